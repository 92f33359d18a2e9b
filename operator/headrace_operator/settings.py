"""Settings of the operator process: HEADRACE_OPERATOR_* in the environment, or flags so named."""

from typing import Literal

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from headrace_common.protocol.redis.client.endpoint import parse_endpoint
from headrace_common.sealing.settings import SealingMode

from .desired.defaults import Platform
from .spec.prometheus_urls import PrometheusUrls, problem_of
from .spec.reserved import Reserved

SHORTEST_KEY = 16  # characters of the password from which others are derived


class OperatorSettings(BaseSettings):
    """The operator's settings, read once; a value out of range stops the start with its name."""

    model_config = SettingsConfigDict(
        env_prefix="HEADRACE_OPERATOR_",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_prog_name="headrace operator",
        extra="forbid",
        frozen=True,
    )

    namespace: str = Field("default", description="the operator's own namespace, and its Lease's")
    watch_all_namespaces: bool = Field(
        False, description="serve ModelServices of every namespace, not only the operator's own"
    )
    watch_nodes: bool = Field(
        False,
        description="watch nodes, and let engines hand over their requests before their node ends; "
        "needs a ClusterRole that may list and watch nodes",
    )
    identity: str | None = Field(
        None, description="name of this replica in the Lease; default: host name and a random part"
    )
    leader_election: bool = Field(True, description="work only while holding the Lease")
    lease_name: str = Field("headrace-operator", description="name of the Lease")
    lease_duration: float = Field(
        15.0, ge=2, description="seconds after which a silent leader is replaced"
    )
    resync_interval: float = Field(
        15.0, gt=0, description="seconds between two looks at a ModelService without change or work"
    )

    redis_url: str = Field(
        "redis://127.0.0.1:6379/0", description="Redis or Valkey, to tell engines to drain"
    )
    redis_admin_url: str | None = Field(
        None,
        description="the same with a user that may create users: the engines of each ModelService "
        "then get a user that can access only their model, in a Secret; docs/operations.md; "
        "default: all engines have engine_redis_secret",
    )
    engine_redis_url: str | None = Field(
        None, description="URL without a user for engines that have their own; default: redis_url"
    )
    engine_redis_secret: str | None = Field(
        None, description="Secret with the URL for engines; default: redis_url in their environment"
    )
    engine_redis_secret_key: str = Field("url", description="key in that Secret")
    engine_redis_ca_secret: str | None = Field(
        None, description="Secret with the CA of a rediss:// server for engines"
    )
    engine_sealing_secret: str | None = Field(
        None, description="Secret with the keyring for engines, beside each ModelService"
    )
    engine_sealing_mode: SealingMode = Field("require", description="their sealing_mode")
    engine_redis_ports: tuple[int, ...] = Field(
        (), description="further ports of Redis: masters behind Sentinels, nodes of a cluster"
    )
    engine_image: str = Field(description="image of engines whose ModelService names none")
    engine_image_pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        "IfNotPresent", description="when the kubelet pulls that image"
    )
    engine_image_pull_secrets: tuple[str, ...] = Field(
        (), description='Secrets with registry credentials, ["name"]'
    )
    downloader_image: str = Field(
        "docker.io/rclone/rclone:1.74.1", description="image with rclone, for models from s3 or gs"
    )
    engine_otlp_endpoint: str | None = Field(
        None, description="OTLP/HTTP endpoint for the traces of engines"
    )
    metrics_namespaces: tuple[str, ...] = Field(
        (), description='namespaces that may scrape engines, beside their own, ["monitoring"]'
    )

    reserved_secrets: tuple[str, ...] = Field(
        (),
        description="Secrets of the operator's namespace that ModelServices there may not name, "
        '["headrace-redis"]; a name that ends in * is a prefix',
    )
    reserved_claims: tuple[str, ...] = Field(
        (), description="claims of the operator's namespace that ModelServices may not mount"
    )

    prometheus_url: str | None = Field(
        None, description="Prometheus to read signals from; default: scrape gateways and engines"
    )
    prometheus_allowed_urls: tuple[str, ...] = Field(
        (),
        description="the only URLs, with the paths below them, that ModelServices may name beside "
        'prometheus_url, ["http://prometheus.monitoring:9090"]; default: all but the node\'s own '
        "addresses and metadata services",
    )
    gateway_namespace: str | None = Field(
        None, description="namespace of the gateways; default: the operator's own"
    )
    gateway_selector: str = Field(
        "app.kubernetes.io/component=gateway", description="labels of gateway pods, as kubectl -l"
    )
    signal_timeout: float = Field(5.0, gt=0, description="seconds to wait for a metrics endpoint")
    max_metrics_page_bytes: int = Field(
        8 * 2**20, ge=2**16, description="longest metrics page of a pod that is read"
    )

    metrics_host: str = Field("127.0.0.1", description="address of /metrics and /health")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of /metrics and /health; 0 picks one; default: none"
    )
    log_level: str = Field("INFO", description="DEBUG, INFO, WARNING or ERROR")
    log_format: Literal["auto", "json", "text"] = Field(
        "auto", description="json lines, or text to read; auto: text on a terminal"
    )

    @model_validator(mode="after")
    def _readable_selector(self) -> "OperatorSettings":
        if not all("=" in part for part in self.gateway_selector.split(",")):
            raise ValueError("gateway_selector must be label=value pairs with commas between them")
        return self

    @model_validator(mode="after")
    def _hides_passwords(self) -> "OperatorSettings":
        if self.redis_admin_url is None:
            return self
        if len(self.password_key) < SHORTEST_KEY:
            raise ValueError(
                f"redis_admin_url must have a password of at least {SHORTEST_KEY} characters: the "
                "passwords of engines are derived from it"
            )
        options = parse_endpoint(self.engine_redis_url or self.redis_url).options
        if "username" in options or "password" in options:
            raise ValueError(
                "engine_redis_url must be set, without a user or password, where redis_admin_url "
                "is: engines have users of their own"
            )
        return self

    @field_validator("prometheus_url", "prometheus_allowed_urls")
    @classmethod
    def _are_urls(cls, value: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
        given = (value,) if isinstance(value, str) else value or ()
        for url in given:
            if (problem := problem_of(url)) is not None:
                raise ValueError(problem)
        return value

    @property
    def prometheus_urls(self) -> PrometheusUrls:
        return PrometheusUrls(self.prometheus_url, self.prometheus_allowed_urls)

    @property
    def reserved(self) -> Reserved:
        return Reserved(self.namespace, self.reserved_secrets, self.reserved_claims)

    @property
    def gateway_labels(self) -> dict[str, str]:
        pairs = (part.split("=", 1) for part in self.gateway_selector.split(","))
        return {key.strip(): value.strip() for key, value in pairs}

    @property
    def _queue_ports(self) -> tuple[int, ...]:
        """The ports of the URL, and those of masters behind Sentinels or of a cluster's nodes."""
        named = [port for _, port in parse_endpoint(self.redis_url).addresses]
        return tuple(dict.fromkeys((*named, *self.engine_redis_ports)))

    @property
    def password_key(self) -> bytes:
        """The key from which passwords of engines' Redis users are derived."""
        options = parse_endpoint(self.redis_admin_url or self.redis_url).options
        return str(options.get("password", "")).encode()

    @property
    def _engine_url(self) -> str:
        if self.redis_admin_url is not None and self.engine_redis_url is not None:
            return self.engine_redis_url
        return self.redis_url

    @property
    def platform(self) -> Platform:
        secret = self.engine_redis_secret
        own = (self.namespace,) if self.watch_all_namespaces else ()
        return Platform(
            engine_image=self.engine_image,
            engine_image_pull_policy=self.engine_image_pull_policy,
            image_pull_secrets=self.engine_image_pull_secrets,
            downloader_image=self.downloader_image,
            queue_url=self._engine_url,
            queue_users=self.redis_admin_url is not None,
            queue_ports=self._queue_ports,
            queue_secret=None if secret is None else (secret, self.engine_redis_secret_key),
            queue_ca_secret=self.engine_redis_ca_secret,
            sealing_secret=self.engine_sealing_secret,
            sealing_mode=self.engine_sealing_mode,
            otlp_endpoint=self.engine_otlp_endpoint,
            metrics_namespaces=tuple(dict.fromkeys((*own, *self.metrics_namespaces))),
        )
