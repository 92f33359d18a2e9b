"""Every Redis key of the queue protocol: its name, type, content and lifetime.

All keys of one shard of a model share a hash tag, so that a script over them runs on one node of a
cluster; each gateway and engine has another tag. No other module builds a key.

Every key that an engine may touch contains its model, so that a Redis user can be limited to one
model.
"""

import re
import secrets
from binascii import crc_hqx
from functools import lru_cache
from itertools import count
from urllib.parse import quote

GROUP = "e"  # the one consumer group of a queue: the model's engines
PRIORITIES = ("hi", "n", "lo")
DEFAULT_SHARD = 0
MAX_SHARDS = 48

# Milliseconds. How long an engine may be silent before others take over its requests.
LEASE_MS = 10_000
# A gateway without a beat for this long is gone, unless its settings say another time: its requests
# are rebuilt from the journal.
GATEWAY_TTL_MS = 10_000
# An ended request is stored for its gateway, which asks within seconds if it missed the last
# frames. A longer time costs memory for every request.
ENDED_TTL_MS = 120_000
# How long a live request's record outlives its deadline, so that the client learns of the deadline.
GRACE_MS = 600_000
# A gateway's frames are stored as long as a gateway may stall, or a journal may lag.
FRAMES_KEPT_MS = 60_000
FRAMES_TTL_MS = 120_000
CONTROLS_TTL_MS = 120_000
# An outcome that is stored elsewhere too: only its engine may still ask for it, by a repetition.
FORGOTTEN_MS = 5_000
CONTROLS_KEPT = 1_000
# How long engines still read a shard after it was last in use; longer than any request lives.
SHARDS_KEPT_MS = 7 * 86_400_000
DEAD_LETTERS_KEPT = 10_000
# The bounds of a shard's ledger that gateways set by default.
LEDGER_KEPT = 100_000
LEDGER_TTL_MS = 7 * 86_400_000
WAKEUPS_KEPT = 16
KV_EVENTS_TTL_MS = 60_000


def new_request_id(shard: int = DEFAULT_SHARD) -> str:
    """The shard, then 128 random bits, so that every process that knows the id finds its keys."""
    return f"{shard}.{secrets.token_hex(16)}"


# The end of ids of processes that know only the shared keys, which do not name a model.
_OLDER_ID = re.compile(r"\.[0-9a-f]{12}\Z")


def new_incarnation(name: str) -> str:
    """An id for one incarnation of a gateway or engine; a restarted process gets a new one."""
    return f"{name}.{secrets.token_hex(8)}"


def names_models(process_id: str) -> bool:
    """Whether a gateway or engine uses the keys that name a model; older versions do not."""
    return _OLDER_ID.search(process_id) is None


def shard_of(request_id: str) -> int:
    """The shard that a request id names; DEFAULT_SHARD if it names none."""
    shard, dot, _ = request_id.partition(".")
    return int(shard) if dot and shard.isascii() and shard.isdigit() else DEFAULT_SHARD


def _tag(*parts: object) -> str:
    return "{" + _name(*parts) + "}"


def _name(*parts: object) -> str:
    return ".".join([_quoted(str(part)) for part in parts])


@lru_cache(maxsize=4096)
def _quoted(part: str) -> str:
    return quote(part, safe="-_.~/")


SLOTS = 16_384  # slots of a Redis Cluster
_NEAR = 8  # the maximal distance of a shard from its place, in slots


def shard_place(shard: int) -> float:
    """The distance of a shard from shard 0 around the cluster's slots, as a fraction of all slots.

    A Halton sequence of base 3 and then 2: it does not depend on the number of shards, and yet 3,
    6, 12, 24 and 48 shards are evenly spaced.
    """
    rest, third = divmod(shard, 3)
    part, width = third / 3, 1 / 6
    while rest:
        rest, half = divmod(rest, 2)
        part, width = part + half * width, width / 2
    return part


@lru_cache(maxsize=4096)
def _shard_tag(model: str, shard: int) -> str:
    """The hash tag of a shard. Except for shard 0, a number at its end moves it to its place.

    By chance, three shards would be on three nodes in only two of nine cases.
    """
    name = _name(model, shard)
    if shard == DEFAULT_SHARD:
        return "{" + name + "}"
    first = crc_hqx(_name(model, DEFAULT_SHARD).encode(), 0) % SLOTS
    wanted = first + round(shard_place(shard) * SLOTS)
    stem = crc_hqx(f"{name}:".encode(), 0)
    near = (n for n in count() if _apart(crc_hqx(b"%d" % n, stem), wanted) <= _NEAR)
    return f"{{{name}:{next(near)}}}"


def _apart(slot: int, other: int) -> int:
    distance = (slot - other) % SLOTS
    return min(distance, SLOTS - distance)


class ShardKeys:
    """The keys of one shard of one model's queue."""

    __slots__ = ("tag",)

    def __init__(self, model: str, shard: int = DEFAULT_SHARD) -> None:
        self.tag = _shard_tag(model, shard)

    def queue(self, priority: str) -> str:
        """Stream with GROUP; entry {r: request id, v: version, t: time of admission, if that is not
        the entry's id}: running requests, and the next waiting ones. Entries are acked and deleted
        together at the request's end. The stream is bounded by ADMIT and never trimmed, since a
        trim drops unread entries.
        """
        return f"q:{self.tag}:{priority}"

    @property
    def queues(self) -> list[str]:
        return [self.queue(priority) for priority in PRIORITIES]

    def record(self, request_id: str) -> str:
        """Hash, the request's state.

        Lives until its deadline + `GRACE_MS`, or its end + `ENDED_TTL_MS`.

            st  queued|running|done|failed|cancelled    ph  w(aiting)|x(ecuting)
            q   priority              mid entry id      a   attempt     o   owner
            g   gateway               gs  former ones   je  engine/attempt that writes the journal
            f   failures without progress               pn  tokens made, pt those at the last take
            fp  fingerprint           d   deadline      tk  tokens      pk  prompt tokens
            v   version               tn  tenant        t   time of admission
            wg  the tenant's weight, if not 1
            out outcome               why failure code  gi  whether a client got its outcome
            kp  ms to store it after its end, if longer lt  when its state was lost
            an  how often it was queued again after its end
            pe  engine it is placed with                pu  until when it waits for that engine
            ps  how many requests were taken before it meanwhile
            lo  adapter that its engine must have loaded, with its version
            va  its side: canary, or nothing        wf  digest of the weights that it runs with
            ls  whether only engines with these weights may continue it
            ul  bounds of the ledger that it is entered in       ki  API key    ad  adapter
            ue  number and sums of its entries there             og  output tokens that were given
            u<attempt>  what the attempt used
        """
        return self.records + request_id

    @property
    def records(self) -> str:
        return f"r:{self.tag}:"

    def payload(self, request_id: str) -> str:
        """String, the msgpack request. Separate from the queue's entry, so that its memory is freed
        as soon as the request ends. Lives as long as the record."""
        return self.payloads + request_id

    @property
    def payloads(self) -> str:
        return f"p:{self.tag}:"

    def image(self, digest: bytes) -> str:
        """String, an encoded image that requests of this shard name. Lives as long as the last of
        them, and `ENDED_TTL_MS` after its end."""
        return f"im:{self.tag}:{digest.hex()}"

    def image_requests(self, digest: bytes) -> str:
        """Sorted set, the requests that name an image, by until when (Unix ms). Lives as the
        image."""
        return f"ir:{self.tag}:{digest.hex()}"

    def tenant_images(self, tenant: str) -> str:
        """Sorted set, a tenant's images in this shard, "<digest>:<bytes>" by until when they live
        (Unix ms). Lives as the last of them."""
        return f"it:{self.tag}:{tenant}"

    def journal(self, request_id: str) -> str:
        """Hash, the output that beats have written. <choice>: number of tokens; <choice>:<index>:
        packed ids from that output position; <choice>l:<index>: their log probabilities, if
        requested; <choice>f: how it ended. Lives as long as the record, at most to the request's
        end."""
        return self.journals + request_id

    @property
    def journals(self) -> str:
        return f"j:{self.tag}:"

    @property
    def stats(self) -> str:
        """Hash of the shard.

        Never expires; a few fields:

            w/wt      waiting requests/tokens
            w1-w3     waiting requests by priority, p1-p3 of them in lists of their tenants
            cn/cl     reads since n/lo had their share
            er/et/e0  rate of endings, when last, when first
            sh/su     in shard 0: how many shards the model has, and until when engines read them
        """
        return f"s:{self.tag}"

    @property
    def counters(self) -> str:
        """Hash <tenant>: tokens that it has used, as far as they count; "": those of the tenant
        served last. +<tenant>: all that was counted in this shard since @; =: when that was read;
        <<shard>: what was known of another shard. Expires when nothing was taken for an hour."""
        return f"vc:{self.tag}"

    @property
    def tenants(self) -> str:
        """Sorted set, tenants by the number of their waiting requests."""
        return f"tw:{self.tag}"

    def waiting_tenants(self, priority: int) -> str:
        """Sorted set, tenants with requests in lists of this priority (1-3) by their counters."""
        return f"vt:{self.tag}:{priority}"

    def tenant_list(self, priority: int, tenant: str) -> str:
        """List, a tenant's request ids that wait after the stream's entry, the oldest first."""
        return f"{self.tenant_lists}{priority}:{tenant}"

    @property
    def tenant_lists(self) -> str:
        return f"tq:{self.tag}:"

    @property
    def placed(self) -> str:
        """Prefix of a list for each engine, <priority>:<engine>: ids of waiting requests that are
        placed with it, the oldest first. Expires an hour after the last was added."""
        return f"pl:{self.tag}:"

    @property
    def fairness(self) -> list[str]:
        """The last keys of every script with lua/tenants.lua."""
        waiting = [self.waiting_tenants(priority) for priority in (1, 2, 3)]
        return [self.counters, self.tenants, *waiting, self.tenant_lists, self.records]

    @property
    def wakeups(self) -> str:
        """Stream, one entry when a started request becomes claimable. WAKEUPS_KEPT entries."""
        return f"w:{self.tag}"

    @property
    def dead_letters(self) -> str:
        """Stream {r: request id, why, n: failures, a: attempt}; never a prompt. A poisonous
        request's payload stays for a day. DEAD_LETTERS_KEPT entries."""
        return f"dl:{self.tag}"

    @property
    def ledger(self) -> str:
        """Stream {e: msgpack list}, what each request that has ended used (see UsageEntry). Bounded
        by the gateways' `usage_ledger_entries` and `usage_ledger_retention`."""
        return f"ul:{self.tag}"

    @property
    def engines(self) -> str:
        """Set of engine ids, only in shard 0, which every engine reads. Readers remove those whose
        status has expired."""
        return f"eng:{self.tag}"

    def status(self, engine_id: str) -> str:
        """String, an engine's msgpack EngineStatus. Lives for one lease."""
        return f"es:{self.tag}:{engine_id}"

    @property
    def starts(self) -> str:
        """Set of ids of engines that start, only in shard 0. Lives as long as the last of them."""
        return f"en:{self.tag}"

    def start(self, engine_id: str) -> str:
        """String, an engine's msgpack EngineStart, only in shard 0. Lives 10 s, renewed until the
        engine serves."""
        return f"ep:{self.tag}:{engine_id}"

    def snapshot(self, engine_id: str) -> str:
        """String, an engine's msgpack EngineSnapshot, only in shard 0. Written while a gateway asks
        for it. Lives 15 s."""
        return f"ls:{self.tag}:{engine_id}"

    def kv_events(self, engine_id: str) -> str:
        """Stream {e: msgpack KVEvent}, only in shard 0: which KV blocks an engine has cached. The
        first entry has all of them; at most MAX_EVENTS entries. Lives KV_EVENTS_TTL_MS, renewed."""
        return f"kv:{self.tag}:{engine_id}"

    def adapter_report(self, engine_id: str) -> str:
        """String, an engine's msgpack AdapterReport, only in shard 0, if it takes work. Lives for
        one lease."""
        return f"ar:{self.tag}:{engine_id}"

    @property
    def canary(self) -> str:
        """Hash, only in shard 0: the canary's percentage of the requests, the comparisons per
        minute, how many were made and were equal, and when each side's engines last wrote a beat
        (Redis' time, ms). No expiry."""
        return f"cy:{self.tag}"

    @property
    def comparing(self) -> str:
        """Empty string, only in shard 0: while it exists, no gateway repeats a request on the
        canary. Lives for the interval between two comparisons."""
        return f"cc:{self.tag}"

    @property
    def decision(self) -> str:
        """String, the operator's latest msgpack ScalingDecision, only in shard 0. Lives 120 s."""
        return f"sd:{self.tag}"


def scratch_keys(model: str | None) -> list[str]:
    """A stream and another key to test a process's permissions, in any slot of a cluster.

    Those of an engine are in a shard of its model.
    """
    name = secrets.token_hex(8)
    if model is None:
        tag = _tag("headrace", "probe", name)
        return [f"q:{tag}", f"r:{tag}"]
    shard = ShardKeys(model, secrets.randbelow(MAX_SHARDS))
    return [shard.queue(f"probe.{name}"), shard.record(f"probe.{name}")]


def frames(gateway_id: str, model: str) -> str:
    """Stream {f: packed Frame} to one incarnation of a gateway from a model's engines, and the log
    from which a dead gateway's streams are rebuilt. Trimmed to FRAMES_KEPT_MS, lives FRAMES_TTL_MS,
    renewed."""
    return f"{shared_frames(gateway_id)}:{_name(model)}"


def shared_frames(gateway_id: str) -> str:
    """Like `frames`, from engines of older versions, of all models. Its gateway writes empty frames
    to it, which wake its reader."""
    return f"o:{_tag('g', gateway_id)}"


def frames_between(gateway_id: str, engine_id: str, model: str) -> str:
    """The stream that this engine of the model writes to for this gateway."""
    if names_models(gateway_id) and names_models(engine_id):
        return frames(gateway_id, model)
    return shared_frames(gateway_id)


def gateway_beat(gateway_id: str) -> str:
    """String, which exists while the gateway lives, for other gateways and engines of older
    versions. The gateway's lease, renewed by its beat."""
    return f"gw:{_tag('g', gateway_id)}"


def gateway_beat_to(gateway_id: str, model: str) -> str:
    """Like `gateway_beat`, for the engines of a model that the gateway has had requests for."""
    beat = gateway_beat(gateway_id)
    return f"{beat}:{_name(model)}" if names_models(gateway_id) else beat


def controls(engine_id: str, model: str) -> str:
    """Stream {c: control message} to one engine of a model. CONTROLS_KEPT entries,
    CONTROLS_TTL_MS."""
    shared = shared_controls(engine_id)
    return f"{shared}:{_name(model)}" if names_models(engine_id) else shared


def shared_controls(engine_id: str) -> str:
    """Like `controls`, from gateways of older versions."""
    return f"c:{_tag('e', engine_id)}"


def slot(group: str) -> str:
    """Hash, the slot of an accelerator that engines share. o its holder, s since when, u until when
    its lease lasts, l the holder before. Of each member, f:<engine> what waits for it, b:<engine>
    when it said so, t:<engine> when its last turn ended. Times are Unix ms. Lives ten leases."""
    return f"sl:{_tag('s', group)}"


# Hash, an entry {name: msgpack RegisteredModel} for each model that engines have registered. Never
# expires: its owner removes an entry. A tag of its own, since entries and files change together.
MODELS = "m:{m}"
# The field with the id of this incarnation of the data: if it has changed, Redis has lost the data.
MODELS_STORE = b""


def model_files(model: str) -> str:
    """String, a registered model's tokenizer and configuration files, compressed. Lives as long as
    its entry."""
    return f"mf:{{m}}:{model}"


# Hash, a grant {name: msgpack RegistrationGrant} for each model whose engines have a separate
# Redis user. It says what they may register. The creator of the user writes it. The empty field is
# that of MODELS_STORE.
GRANTS = "mg:{m}"


def granted_model(model: str) -> str:
    """Hash, what engines that may touch one model alone have registered of it: e msgpack
    RegisteredModel, f its files, compressed. Removed with its grant."""
    return f"me:{{m}}:{_name(model)}"


# Hash <model>: the version of its set of adapters, so that one command tells what has changed.
# Never expires.
ADAPTER_SETS = "av:{m}"


def adapter_set(model: str) -> str:
    """Hash, the adapters that engines of a model load while they serve: v a random version, s
    msgpack entries. Never expires."""
    return f"as:{{m}}:{_name(model)}"


def model_loads(digest: str) -> str:
    """Sorted set, gateways that have begun to load files of this digest and have not ended, by when
    they began (Unix ms). Expires an hour after the last began."""
    return f"ml:{{m}}:{digest}"


def stored_request(request_id: str) -> str:
    """Hash, what any gateway needs to serve a request's answer: n name of its generation, b msgpack
    StoredRequest. Lives longer than any of its outcomes."""
    return f"rq:{_tag(request_id)}"


def client_presence(request_id: str) -> str:
    """String, which exists while a client waits for the request's answer or may reconnect."""
    return f"rw:{_tag(request_id)}"


def readers(request_id: str) -> str:
    """Sorted set, gateways that rebuild a stored request's answer, by when they began (Unix s).
    A gateway that died meanwhile remains in it. Lives as long as the stored request."""
    return f"ra:{_tag(request_id)}"


def account_items(account: str) -> str:
    """Sorted set, a tenant's stored items, "<kind>:<name>" by when they expire (Unix ms). Lives as
    long as the last of them."""
    return f"kb:{_tag('a', account)}"


def account_sizes(account: str) -> str:
    """Sorted set, a tenant's stored items by bytes; "<kind>" by the bytes of all items of a kind,
    "<kind>#" by their number. Lives as long as the items."""
    return f"kz:{_tag('a', account)}"


# String, random bytes that all gateways share, so that no other process can compute a request's id
# from its idempotency key. Never expires.
KEY_SALT = "rk:{rk}"


# String, sealed random bytes. Opening it proves that a process has the sealing keys; the bytes are
# the key of the digests that are not sealed. Never expires.
SEALING_CHECK = "sc:{sc}"


def key_usage(key_id: str) -> str:
    """Hash, what an API key has used of its limits: r requests, t tokens, at Unix ms of both,
    d usual duration of a request in ms. Limits of a day add dy, the day's number (UTC), and dp and
    do, its prompt and output tokens. Expires IDLE_MS after all usage has decayed."""
    return f"ku:{_tag('k', key_id)}"


def key_leases(key_id: str) -> str:
    """Sorted set, an API key's running requests by when their gateway must have renewed them (Unix
    ms). Lives one lease, renewed."""
    return f"kl:{_tag('k', key_id)}"


def stored_file(file_id: str) -> str:
    """Hash, a client's file: m JSON StoredFile once it is complete, <number> a piece of its
    content. Lives until the file expires."""
    return f"fi:{_tag('f', file_id)}"


def tenant_files(tenant: str) -> str:
    """Sorted set, a tenant's files: "<id>:<bytes>:<until>" by expiry. Lives as long as the last."""
    return f"ft:{_tag('t', tenant)}"


def batch(batch_id: str) -> str:
    """Hash, a batch: m JSON BatchRequest, p JSON BatchProgress, c Unix time of its cancellation.
    Lives until its kept_until."""
    return f"ba:{_tag('b', batch_id)}"


def batch_results(batch_id: str) -> str:
    """Hash <line>: its result. Lives until the batch has ended and its results are files."""
    return f"br:{_tag('b', batch_id)}"


def batch_marks(batch_id: str) -> str:
    """Hash <line>: "answered:bytes" of its result. Lives as long as the results."""
    return f"bm:{_tag('b', batch_id)}"


def batch_usage(batch_id: str) -> str:
    """Hash <line>: tokens that it used, "input:cached:output:reasoning". Lives as the results."""
    return f"bu:{_tag('b', batch_id)}"


def batch_starts(batch_id: str) -> str:
    """Sorted set "<line>:<gateway>" by Unix time: the gateway has started the line and has neither
    ended it nor left it to others. Line 0 is reading the batch's file, -1 writing its result files.
    Lives as the results."""
    return f"bs:{_tag('b', batch_id)}"


def batch_lease(batch_id: str) -> str:
    """String, the gateway that runs the batch. Lives one lease, renewed."""
    return f"bl:{_tag('b', batch_id)}"


def tenant_batches(tenant: str) -> str:
    """Sorted set, a tenant's batches: "<id>:0:<until>" by expiry. Lives as long as the last."""
    return f"bt:{_tag('t', tenant)}"


# Sorted set, tenants whose requests a console shows, by until when (Unix ms). Lives as long as the
# last.
WATCHED_TENANTS = "lw:{lw}"


def shown_requests(tenant: str) -> str:
    """Hash <gateway>: what it knows of the tenant's last requests, JSON. Written while a console
    shows them. Lives 10 s."""
    return f"lr:{_tag('t', tenant)}"


# Sorted set, batches of all tenants that have not ended: "<id>:0:<until>" by expiry. A member is
# removed at its batch's end.
OPEN_BATCHES = "bo:{bo}"


def refused_grammar(digest: str) -> str:
    """String "reason:attempts" of a grammar that was too expensive to compile. Lives an hour."""
    return f"gr:{_tag(digest)}"
