"""What a release decides for all of its ModelServices; a value, filled from the settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """Defaults of engines. `queue_secret` is a Secret's (name, key) beside each ModelService.

    `queue_ca_secret` names a Secret with `ca.crt` for a rediss:// server. `metrics_namespaces` may
    scrape engines, apart from the ModelService's own.
    """

    engine_image: str
    engine_image_pull_policy: str = "IfNotPresent"
    image_pull_secrets: tuple[str, ...] = ()
    downloader_image: str = "docker.io/rclone/rclone:1.74.1"
    queue_url: str = "redis://127.0.0.1:6379/0"
    queue_ports: tuple[int, ...] = (6379,)
    queue_secret: tuple[str, str] | None = None
    queue_ca_secret: str | None = None
    otlp_endpoint: str | None = None
    metrics_namespaces: tuple[str, ...] = ()
