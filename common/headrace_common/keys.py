"""Every Redis key of the queue protocol: its name, type, content and how long it lives.

All keys of one shard of a model share a hash tag, so that a script over them runs on one node of a
cluster; gateways and engines have tags of their own. Nothing else in the project spells a key.
"""

import secrets
from binascii import crc_hqx
from functools import lru_cache
from itertools import count
from urllib.parse import quote

GROUP = "e"  # the one consumer group of a queue: the model's engines
PRIORITIES = ("hi", "n", "lo")
DEFAULT_SHARD = 0
MAX_SHARDS = 48

# Milliseconds. How long an engine may be silent before others take its requests over.
LEASE_MS = 10_000
# A gateway that did not beat for this long is gone, if its settings do not say another time: its
# requests are rebuilt from the journal.
GATEWAY_TTL_MS = 10_000
# An ended request is remembered for its gateway, should that have missed the last frames: it asks
# again within seconds. Longer costs memory for every request ever run.
ENDED_TTL_MS = 120_000
# What a live request keeps beyond its deadline, so that the deadline itself is always answered.
GRACE_MS = 600_000
# A gateway's frames: as far back as a gateway may have been stalled, or a journal behind.
FRAMES_KEPT_MS = 60_000
FRAMES_TTL_MS = 120_000
CONTROLS_TTL_MS = 120_000
# An outcome that somebody has put elsewhere: only its engine may still ask for it, by repetition.
FORGOTTEN_MS = 5_000
CONTROLS_KEPT = 1_000
# How long engines read a shard after the last one that was set to: no request lives so long.
SHARDS_KEPT_MS = 7 * 86_400_000
DEAD_LETTERS_KEPT = 10_000
WAKEUPS_KEPT = 16


def new_request_id(shard: int = DEFAULT_SHARD) -> str:
    """128 random bits behind the shard, so that anyone who knows the id finds its keys."""
    return f"{shard}.{secrets.token_hex(16)}"


def new_incarnation(name: str) -> str:
    """An id for one life of a gateway or engine: a restarted one must not answer to the old."""
    return f"{name}.{secrets.token_hex(6)}"


def shard_of(request_id: str) -> int:
    """The shard that a request id names; DEFAULT_SHARD where it names none."""
    shard, dot, _ = request_id.partition(".")
    return int(shard) if dot and shard.isascii() and shard.isdigit() else DEFAULT_SHARD


def _tag(*parts: object) -> str:
    return "{" + _name(*parts) + "}"


def _name(*parts: object) -> str:
    return ".".join(quote(str(part), safe="-_.~/") for part in parts)


SLOTS = 16_384  # of a Redis Cluster
_NEAR = 8  # slots that a shard may be away from its place


def shard_place(shard: int) -> float:
    """How far behind shard 0 a shard is around the cluster's slots, as a part of them all.

    Does not depend on how many shards there are, and yet 3, 6, 12, 24 and 48 of them are evenly
    apart: a Halton sequence, of base 3 and then 2.
    """
    rest, third = divmod(shard, 3)
    part, width = third / 3, 1 / 6
    while rest:
        rest, half = divmod(rest, 2)
        part, width = part + half * width, width / 2
    return part


@lru_cache(maxsize=4096)
def _shard_tag(model: str, shard: int) -> str:
    """The hash tag of a shard. A number behind all but shard 0's puts it where its place is: by
    chance three shards would be on three nodes in two of nine cases only."""
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
        """Stream with GROUP; entry {r: request id, v: version, t: when it was admitted, where that
        is not its id}: what runs, and of what waits the next one. Acked and deleted together, at
        the request's end; never trimmed, since a trim drops what nobody has read: bounded at ADMIT.
        """
        return f"q:{self.tag}:{priority}"

    @property
    def queues(self) -> list[str]:
        return [self.queue(priority) for priority in PRIORITIES]

    def record(self, request_id: str) -> str:
        """Hash, the request's state. Lives until deadline + GRACE_MS, once ended ENDED_TTL_MS.

        st queued|running|done|failed|cancelled, q priority, mid entry id, a attempt, o owner,
        g gateway, gs former gateways, je engine/attempt that writes the journal, f failures without
        progress, pn tokens made, pt those at the last take, ph w(aiting)|x(ecuting),
        fp fingerprint, d deadline, tk tokens, pk prompt tokens, v version, tn tenant, t when it
        was admitted, out outcome, why failure code, kp ms to keep it once ended, where that is
        longer, lt when its state was lost, an how often it was queued again after its end,
        gi somebody was given its outcome. Where it
        was placed: pe with which engine, pu until when it waits for that, ps how
        many were taken before it.
        """
        return self.records + request_id

    @property
    def records(self) -> str:
        return f"r:{self.tag}:"

    def payload(self, request_id: str) -> str:
        """String, the msgpack request. Apart from the queue's entry, so that memory is freed at
        once when the request ends. Lives as the record."""
        return self.payloads + request_id

    @property
    def payloads(self) -> str:
        return f"p:{self.tag}:"

    def journal(self, request_id: str) -> str:
        """Hash, output as far as beats wrote it. <choice>: number of tokens; <choice>:<index>:
        packed ids from that output position; <choice>l:<index>: their log probabilities, where
        asked for; <choice>f: how it ended. Lives as the record, gone at the request's end."""
        return self.journals + request_id

    @property
    def journals(self) -> str:
        return f"j:{self.tag}:"

    @property
    def stats(self) -> str:
        """Hash of the shard: w/wt waiting requests/tokens, w1-w3 those by priority, p1-p3 of them
        in lists of their tenants, cn/cl reads since n/lo had their share, er/et/e0 rate of endings,
        when last, when first; of shard 0 also sh/su how many shards the model has, and until when
        engines read them. Lives for ever, a few fields."""
        return f"s:{self.tag}"

    @property
    def counters(self) -> str:
        """Hash <tenant>: tokens that it has used, as far as they count; "": those of the last one
        served. Until nothing was taken for an hour."""
        return f"vc:{self.tag}"

    @property
    def tenants(self) -> str:
        """Sorted set, tenants by how many requests of theirs wait."""
        return f"tw:{self.tag}"

    def waiting_tenants(self, priority: int) -> str:
        """Sorted set, tenants with requests in lists of this priority (1-3) by their counters."""
        return f"vt:{self.tag}:{priority}"

    def tenant_list(self, priority: int, tenant: str) -> str:
        """List, request ids of a tenant that wait behind the stream's entry, the oldest first."""
        return f"{self.tenant_lists}{priority}:{tenant}"

    @property
    def tenant_lists(self) -> str:
        return f"tq:{self.tag}:"

    @property
    def placed(self) -> str:
        """Prefix of a list for each engine, <priority>:<engine>: ids of waiting requests that are
        placed with it, the oldest first. Until an hour after the last was added."""
        return f"pl:{self.tag}:"

    @property
    def fairness(self) -> list[str]:
        """What the scripts with lua/tenants.lua have as their last keys."""
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
    def engines(self) -> str:
        """Set of engine ids, of shard 0 alone: every engine reads that. Those whose status has
        lapsed are removed by readers."""
        return f"eng:{self.tag}"

    def status(self, engine_id: str) -> str:
        """String, an engine's msgpack EngineStatus. Lives for one lease."""
        return f"es:{self.tag}:{engine_id}"


def frames(gateway_id: str) -> str:
    """Stream {f: packed Frame} to one incarnation of a gateway, and the log from which a dead
    gateway's streams are rebuilt. Trimmed to FRAMES_KEPT_MS, lives FRAMES_TTL_MS, renewed."""
    return f"o:{_tag('g', gateway_id)}"


def gateway_beat(gateway_id: str) -> str:
    """String, there while the gateway lives. The gateway's lease, renewed by its beat."""
    return f"gw:{_tag('g', gateway_id)}"


def controls(engine_id: str) -> str:
    """Stream {c: control message} to one engine. CONTROLS_KEPT entries, CONTROLS_TTL_MS."""
    return f"c:{_tag('e', engine_id)}"


# Hash, an entry {name: msgpack RegisteredModel} for each model that engines have registered. For
# ever: who owns an entry removes it. A tag of its own, since entries and files change together.
MODELS = "m:{m}"
# Its field that names this life of the data: another one tells that Redis has lost what it held.
MODELS_STORE = b""


def model_files(model: str) -> str:
    """String, a registered model's tokenizer and configuration files, compressed. As its entry."""
    return f"mf:{{m}}:{model}"


def model_loads(digest: str) -> str:
    """Sorted set, gateways that have begun to load files of this digest and have not ended, by when
    they began (Unix ms). An hour after the last began."""
    return f"ml:{{m}}:{digest}"


def stored_request(request_id: str) -> str:
    """Hash, what any gateway needs to serve a request's answer: n name of its generation, b msgpack
    StoredRequest. Lives until no outcome of it can be left."""
    return f"rq:{_tag(request_id)}"


def wanted(request_id: str) -> str:
    """String, there while a client wants the request's answer or may come back for it."""
    return f"rw:{_tag(request_id)}"


def attending(request_id: str) -> str:
    """Sorted set, gateways that make a stored request's answer anew, by when they began (Unix s);
    one that has ended is still there. As the stored request."""
    return f"ra:{_tag(request_id)}"


def account_items(account: str) -> str:
    """Sorted set, what a tenant leaves in the store, "<kind>:<name>" by when it lapses (Unix ms).
    As the last of them."""
    return f"kb:{_tag('a', account)}"


def account_sizes(account: str) -> str:
    """Sorted set, the same by bytes; "<kind>" by the bytes of all of a kind, "<kind>#" by how many
    they are. As the items."""
    return f"kz:{_tag('a', account)}"


# String, random bytes that all gateways share, so that nobody else can tell a request's id from its
# idempotency key. For ever.
KEY_SALT = "rk:{rk}"


def key_usage(key_id: str) -> str:
    """Hash, what an API key has used of its limits: r requests, t tokens, at Unix ms of both,
    d usual duration of a request in ms. Until all is forgotten, then IDLE_MS."""
    return f"ku:{_tag('k', key_id)}"


def key_leases(key_id: str) -> str:
    """Sorted set, an API key's running requests by when their gateway must have renewed them (Unix
    ms). Lives one lease, renewed."""
    return f"kl:{_tag('k', key_id)}"


def stored_file(file_id: str) -> str:
    """Hash, a client's file: m JSON StoredFile once it is whole, <number> a piece of its content.
    Until the file expires."""
    return f"fi:{_tag('f', file_id)}"


def tenant_files(tenant: str) -> str:
    """Sorted set, a tenant's files: "<id>:<bytes>:<until>" by until when. As the last of them."""
    return f"ft:{_tag('t', tenant)}"


def batch(batch_id: str) -> str:
    """Hash, a batch: m JSON BatchRequest, p JSON BatchProgress, c Unix time of its cancellation.
    Until its kept_until."""
    return f"ba:{_tag('b', batch_id)}"


def batch_results(batch_id: str) -> str:
    """Hash <line>: its result, until the batch has ended and they are files."""
    return f"br:{_tag('b', batch_id)}"


def batch_marks(batch_id: str) -> str:
    """Hash <line>: "answered:bytes" of its result. As the results."""
    return f"bm:{_tag('b', batch_id)}"


def batch_usage(batch_id: str) -> str:
    """Hash <line>: tokens that it used, "input:cached:output:reasoning". As the results."""
    return f"bu:{_tag('b', batch_id)}"


def batch_starts(batch_id: str) -> str:
    """Sorted set "<line>:<gateway>" by Unix time: that gateway has started the line, and neither
    ended it nor left it to others. 0 is reading the batch's file, -1 writing those of its results.
    As the results."""
    return f"bs:{_tag('b', batch_id)}"


def batch_lease(batch_id: str) -> str:
    """String, the gateway that runs the batch. Lives one lease, renewed."""
    return f"bl:{_tag('b', batch_id)}"


def tenant_batches(tenant: str) -> str:
    """Sorted set, a tenant's batches: "<id>:0:<until>" by until when. As the last of them."""
    return f"bt:{_tag('t', tenant)}"


# Sorted set, batches of all tenants that have not ended: "<id>:0:<until>" by until when they are
# kept. A member goes with its batch's end.
OPEN_BATCHES = "bo:{bo}"


def refused_grammar(digest: str) -> str:
    """String "excess:attempts" of a grammar that was too expensive to compile. An hour."""
    return f"gr:{_tag(digest)}"
