"""A release's defaults for all its ModelServices: a value made from the settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Defaults of engines. Secrets are in the namespace of each ModelService.

    `queue_secret` is the (name, key) of the Secret with the queue's URL. With `queue_users` the
    engines of each ModelService have their own Redis user, in a Secret that the operator makes, and
    `queue_url` has no user. `queue_ca_secret` names a Secret with `ca.crt` for a rediss:// server,
    `sealing_secret` one with the keyring. `metrics_namespaces` may scrape engines, as may the
    ModelService's own.
    """

    engine_image: str
    engine_image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    downloader_image: str = "docker.io/rclone/rclone:1.74.1"
    queue_url: str = "redis://127.0.0.1:6379/0"
    queue_ports: tuple[int, ...] = (6379,)
    queue_secret: tuple[str, str] | None = None
    queue_ca_secret: str | None = None
    queue_users: bool = False
    sealing_secret: str | None = None
    sealing_mode: str = "require"
    otlp_endpoint: str | None = None
    metrics_namespaces: tuple[str, ...] = ()
