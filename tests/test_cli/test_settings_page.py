"""docs/settings.md has every current setting, and no document names a setting that does not
exist."""

import re

from headrace_testing.pages.cli import commands
from headrace_testing.pages.settings import PAGE, PROCESSES, page

ROOT = PAGE.parent.parent


def test_the_settings_page_matches_the_settings_classes() -> None:
    assert PAGE.read_text() == page(), "`make generated` writes it anew"


def test_variables_in_the_documents_are_settings() -> None:
    known = {
        f"{settings.model_config['env_prefix']}{name.upper()}"
        for settings in PROCESSES.values()
        for name in settings.model_fields
    }
    known |= {
        parameter.envvar
        for _, command in commands()
        for parameter in command.params
        if isinstance(parameter.envvar, str)
    }
    documents = [ROOT / "README.md", ROOT / "Dockerfile", *ROOT.glob("docs/**/*.md")]
    documents += ROOT.glob("charts/**/*.md")
    prefixes = "|".join(str(each.model_config["env_prefix"]) for each in PROCESSES.values())
    for document in documents:
        named = set(re.findall(rf"(?:{prefixes})[A-Z_]*[A-Z]", document.read_text()))
        assert named <= known, document


def test_every_setting_says_what_it_does() -> None:
    for settings in PROCESSES.values():
        assert [
            name for name, field in settings.model_fields.items() if not field.description
        ] == []
