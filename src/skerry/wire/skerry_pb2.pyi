from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ("protocol",)
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    def __init__(self, protocol: _Optional[int] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TellRequest(_message.Message):
    __slots__ = ("run_id", "kind", "data_json")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    DATA_JSON_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    kind: str
    data_json: str
    def __init__(self, run_id: _Optional[str] = ..., kind: _Optional[str] = ..., data_json: _Optional[str] = ...) -> None: ...

class TellReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ProbeUp(_message.Message):
    __slots__ = ("chunk", "wanted")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    wanted: int
    def __init__(self, chunk: _Optional[bytes] = ..., wanted: _Optional[int] = ...) -> None: ...

class ProbeDown(_message.Message):
    __slots__ = ("chunk", "received_bytes")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    received_bytes: int
    def __init__(self, chunk: _Optional[bytes] = ..., received_bytes: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("run_id",)
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    def __init__(self, run_id: _Optional[str] = ...) -> None: ...

class SnapshotReply(_message.Message):
    __slots__ = ("facts_json",)
    FACTS_JSON_FIELD_NUMBER: _ClassVar[int]
    facts_json: str
    def __init__(self, facts_json: _Optional[str] = ...) -> None: ...

class RunDescription(_message.Message):
    __slots__ = ("protocol", "run_id", "sync_json", "job_json", "now", "seal")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SYNC_JSON_FIELD_NUMBER: _ClassVar[int]
    JOB_JSON_FIELD_NUMBER: _ClassVar[int]
    NOW_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    sync_json: str
    job_json: str
    now: float
    seal: int
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., sync_json: _Optional[str] = ..., job_json: _Optional[str] = ..., now: _Optional[float] = ..., seal: _Optional[int] = ...) -> None: ...

class ToSyncer(_message.Message):
    __slots__ = ("hello", "ready", "report", "nothing", "leaving", "restored", "data", "seal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    NOTHING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    RESTORED_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    ready: Ready
    report: Report
    nothing: NothingToGive
    leaving: Leaving
    restored: Restored
    data: Data
    seal: int
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., ready: _Optional[_Union[Ready, _Mapping]] = ..., report: _Optional[_Union[Report, _Mapping]] = ..., nothing: _Optional[_Union[NothingToGive, _Mapping]] = ..., leaving: _Optional[_Union[Leaving, _Mapping]] = ..., restored: _Optional[_Union[Restored, _Mapping]] = ..., data: _Optional[_Union[Data, _Mapping]] = ..., seal: _Optional[int] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("name", "shape", "dtype", "rule")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    rule: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., rule: _Optional[str] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "name", "session", "tensors", "run_id", "step", "tokens", "held", "region", "leased", "lease_floor", "platform")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    LEASE_FLOOR_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    name: str
    session: str
    tensors: _containers.RepeatedCompositeFieldContainer[Tensor]
    run_id: str
    step: int
    tokens: int
    held: _containers.RepeatedScalarFieldContainer[int]
    region: str
    leased: int
    lease_floor: int
    platform: str
    def __init__(self, protocol: _Optional[int] = ..., name: _Optional[str] = ..., session: _Optional[str] = ..., tensors: _Optional[_Iterable[_Union[Tensor, _Mapping]]] = ..., run_id: _Optional[str] = ..., step: _Optional[int] = ..., tokens: _Optional[int] = ..., held: _Optional[_Iterable[int]] = ..., region: _Optional[str] = ..., leased: _Optional[int] = ..., lease_floor: _Optional[int] = ..., platform: _Optional[str] = ...) -> None: ...

class Data(_message.Message):
    __slots__ = ("pools",)
    POOLS_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("name", "size", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    size: int
    fingerprint: int
    def __init__(self, name: _Optional[str] = ..., size: _Optional[int] = ..., fingerprint: _Optional[int] = ...) -> None: ...

class Ready(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Report(_message.Message):
    __slots__ = ("step", "tokens", "step_time_s", "loss", "sent_bytes", "received_bytes", "steps", "stall_s", "stalled_s", "need", "link")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIME_S_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STALL_S_FIELD_NUMBER: _ClassVar[int]
    STALLED_S_FIELD_NUMBER: _ClassVar[int]
    NEED_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    step: int
    tokens: int
    step_time_s: float
    loss: float
    sent_bytes: int
    received_bytes: int
    steps: int
    stall_s: float
    stalled_s: float
    need: DataNeed
    link: LinkAccount
    def __init__(self, step: _Optional[int] = ..., tokens: _Optional[int] = ..., step_time_s: _Optional[float] = ..., loss: _Optional[float] = ..., sent_bytes: _Optional[int] = ..., received_bytes: _Optional[int] = ..., steps: _Optional[int] = ..., stall_s: _Optional[float] = ..., stalled_s: _Optional[float] = ..., need: _Optional[_Union[DataNeed, _Mapping]] = ..., link: _Optional[_Union[LinkAccount, _Mapping]] = ...) -> None: ...

class LinkAccount(_message.Message):
    __slots__ = ("contributions_bytes", "versions_bytes", "state_sent_bytes", "state_received_bytes", "control_sent_bytes", "control_received_bytes", "send_bytes_per_s", "receive_bytes_per_s", "round_trip_s", "queue_s", "waited_s", "ping")
    CONTRIBUTIONS_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_SENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    CONTROL_RECEIVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    SEND_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    RECEIVE_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    WAITED_S_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    contributions_bytes: int
    versions_bytes: int
    state_sent_bytes: int
    state_received_bytes: int
    control_sent_bytes: int
    control_received_bytes: int
    send_bytes_per_s: float
    receive_bytes_per_s: float
    round_trip_s: float
    queue_s: float
    waited_s: float
    ping: int
    def __init__(self, contributions_bytes: _Optional[int] = ..., versions_bytes: _Optional[int] = ..., state_sent_bytes: _Optional[int] = ..., state_received_bytes: _Optional[int] = ..., control_sent_bytes: _Optional[int] = ..., control_received_bytes: _Optional[int] = ..., send_bytes_per_s: _Optional[float] = ..., receive_bytes_per_s: _Optional[float] = ..., round_trip_s: _Optional[float] = ..., queue_s: _Optional[float] = ..., waited_s: _Optional[float] = ..., ping: _Optional[int] = ...) -> None: ...

class DataNeed(_message.Message):
    __slots__ = ("given", "taken", "wanted", "least", "settled")
    GIVEN_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    WANTED_FIELD_NUMBER: _ClassVar[int]
    LEAST_FIELD_NUMBER: _ClassVar[int]
    SETTLED_FIELD_NUMBER: _ClassVar[int]
    given: int
    taken: int
    wanted: int
    least: int
    settled: int
    def __init__(self, given: _Optional[int] = ..., taken: _Optional[int] = ..., wanted: _Optional[int] = ..., least: _Optional[int] = ..., settled: _Optional[int] = ...) -> None: ...

class NothingToGive(_message.Message):
    __slots__ = ("fragment", "round")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ...) -> None: ...

class Leaving(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Restored(_message.Message):
    __slots__ = ("source",)
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    source: str
    def __init__(self, source: _Optional[str] = ...) -> None: ...

class ToLearner(_message.Message):
    __slots__ = ("welcome", "refusal", "begin", "ask", "announce", "stop", "goodbye", "progress", "caution", "give_state", "lease", "no_lease", "pong", "places", "seal")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CAUTION_FIELD_NUMBER: _ClassVar[int]
    GIVE_STATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NO_LEASE_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    refusal: Refusal
    begin: Begin
    ask: Ask
    announce: Announce
    stop: Stop
    goodbye: Goodbye
    progress: Progress
    caution: Caution
    give_state: GiveState
    lease: Lease
    no_lease: NoLease
    pong: Pong
    places: Places
    seal: int
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., refusal: _Optional[_Union[Refusal, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., ask: _Optional[_Union[Ask, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ..., caution: _Optional[_Union[Caution, _Mapping]] = ..., give_state: _Optional[_Union[GiveState, _Mapping]] = ..., lease: _Optional[_Union[Lease, _Mapping]] = ..., no_lease: _Optional[_Union[NoLease, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., places: _Optional[_Union[Places, _Mapping]] = ..., seal: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("ping",)
    PING_FIELD_NUMBER: _ClassVar[int]
    ping: int
    def __init__(self, ping: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("run_id", "slot", "step", "resumed", "versions", "run_tokens", "counted", "merged_rounds", "quarantined", "leased", "places")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    RESUMED_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    MERGED_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    PLACES_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    slot: int
    step: int
    resumed: bool
    versions: _containers.RepeatedScalarFieldContainer[int]
    run_tokens: int
    counted: _containers.RepeatedScalarFieldContainer[int]
    merged_rounds: _containers.RepeatedScalarFieldContainer[int]
    quarantined: bool
    leased: int
    places: Places
    def __init__(self, run_id: _Optional[str] = ..., slot: _Optional[int] = ..., step: _Optional[int] = ..., resumed: bool = ..., versions: _Optional[_Iterable[int]] = ..., run_tokens: _Optional[int] = ..., counted: _Optional[_Iterable[int]] = ..., merged_rounds: _Optional[_Iterable[int]] = ..., quarantined: bool = ..., leased: _Optional[int] = ..., places: _Optional[_Union[Places, _Mapping]] = ...) -> None: ...

class Places(_message.Message):
    __slots__ = ("addresses", "of_fragment")
    ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    OF_FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    addresses: _containers.RepeatedScalarFieldContainer[str]
    of_fragment: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, addresses: _Optional[_Iterable[str]] = ..., of_fragment: _Optional[_Iterable[int]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("pool", "start", "count", "position")
    POOL_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    pool: str
    start: int
    count: int
    position: int
    def __init__(self, pool: _Optional[str] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class NoLease(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Refusal(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("step",)
    STEP_FIELD_NUMBER: _ClassVar[int]
    step: int
    def __init__(self, step: _Optional[int] = ...) -> None: ...

class Ask(_message.Message):
    __slots__ = ("fragment", "round", "min_base", "anew")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    MIN_BASE_FIELD_NUMBER: _ClassVar[int]
    ANEW_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    min_base: int
    anew: bool
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., min_base: _Optional[int] = ..., anew: bool = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("fragment", "version", "round", "counted", "run_tokens")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    round: int
    counted: int
    run_tokens: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., round: _Optional[int] = ..., counted: _Optional[int] = ..., run_tokens: _Optional[int] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason", "final", "expected")
    REASON_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    final: bool
    expected: bool
    def __init__(self, reason: _Optional[str] = ..., final: bool = ..., expected: bool = ...) -> None: ...

class Caution(_message.Message):
    __slots__ = ("quarantined", "reason")
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    quarantined: bool
    reason: str
    def __init__(self, quarantined: bool = ..., reason: _Optional[str] = ...) -> None: ...

class GiveState(_message.Message):
    __slots__ = ("ticket", "part", "held")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    part: int
    held: HeldVersion
    def __init__(self, ticket: _Optional[int] = ..., part: _Optional[int] = ..., held: _Optional[_Union[HeldVersion, _Mapping]] = ...) -> None: ...

class HeldVersion(_message.Message):
    __slots__ = ("fragment", "version")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("run_tokens", "step")
    RUN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    run_tokens: int
    step: int
    def __init__(self, run_tokens: _Optional[int] = ..., step: _Optional[int] = ...) -> None: ...

class BulkToSyncer(_message.Message):
    __slots__ = ("chunk", "hello", "upload", "fetch", "state", "fetch_state", "seal")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    UPLOAD_FIELD_NUMBER: _ClassVar[int]
    FETCH_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FETCH_STATE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    hello: BulkHello
    upload: Upload
    fetch: Fetch
    state: State
    fetch_state: FetchState
    seal: int
    def __init__(self, chunk: _Optional[bytes] = ..., hello: _Optional[_Union[BulkHello, _Mapping]] = ..., upload: _Optional[_Union[Upload, _Mapping]] = ..., fetch: _Optional[_Union[Fetch, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., fetch_state: _Optional[_Union[FetchState, _Mapping]] = ..., seal: _Optional[int] = ...) -> None: ...

class BulkHello(_message.Message):
    __slots__ = ("name", "session")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    name: str
    session: str
    def __init__(self, name: _Optional[str] = ..., session: _Optional[str] = ...) -> None: ...

class Upload(_message.Message):
    __slots__ = ("fragment", "round", "base", "steps", "tokens", "at_step", "codec", "size_bytes", "checksum", "samples_from", "samples_to", "at_tokens", "journal_json", "first_chunk", "resume")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    AT_STEP_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FROM_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_TO_FIELD_NUMBER: _ClassVar[int]
    AT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_JSON_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    base: int
    steps: int
    tokens: int
    at_step: int
    codec: str
    size_bytes: int
    checksum: int
    samples_from: int
    samples_to: int
    at_tokens: int
    journal_json: str
    first_chunk: int
    resume: bool
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., base: _Optional[int] = ..., steps: _Optional[int] = ..., tokens: _Optional[int] = ..., at_step: _Optional[int] = ..., codec: _Optional[str] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., samples_from: _Optional[int] = ..., samples_to: _Optional[int] = ..., at_tokens: _Optional[int] = ..., journal_json: _Optional[str] = ..., first_chunk: _Optional[int] = ..., resume: bool = ...) -> None: ...

class Fetch(_message.Message):
    __slots__ = ("fragment", "version", "have", "first_chunk", "chunks")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    HAVE_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    have: int
    first_chunk: int
    chunks: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., have: _Optional[int] = ..., first_chunk: _Optional[int] = ..., chunks: _Optional[int] = ...) -> None: ...

class FetchState(_message.Message):
    __slots__ = ("part",)
    PART_FIELD_NUMBER: _ClassVar[int]
    part: int
    def __init__(self, part: _Optional[int] = ...) -> None: ...

class State(_message.Message):
    __slots__ = ("ticket", "part", "parts", "size_bytes", "checksum", "reason", "again", "session", "steps", "journal_json")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGAIN_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    JOURNAL_JSON_FIELD_NUMBER: _ClassVar[int]
    ticket: int
    part: int
    parts: int
    size_bytes: int
    checksum: int
    reason: str
    again: bool
    session: str
    steps: int
    journal_json: str
    def __init__(self, ticket: _Optional[int] = ..., part: _Optional[int] = ..., parts: _Optional[int] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., reason: _Optional[str] = ..., again: bool = ..., session: _Optional[str] = ..., steps: _Optional[int] = ..., journal_json: _Optional[str] = ...) -> None: ...

class BulkToLearner(_message.Message):
    __slots__ = ("chunk", "reply", "fetched", "state", "seal")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    REPLY_FIELD_NUMBER: _ClassVar[int]
    FETCHED_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    reply: UploadReply
    fetched: Fetched
    state: State
    seal: int
    def __init__(self, chunk: _Optional[bytes] = ..., reply: _Optional[_Union[UploadReply, _Mapping]] = ..., fetched: _Optional[_Union[Fetched, _Mapping]] = ..., state: _Optional[_Union[State, _Mapping]] = ..., seal: _Optional[int] = ...) -> None: ...

class UploadReply(_message.Message):
    __slots__ = ("fragment", "round", "accepted", "reason", "damaged", "missing")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    round: int
    accepted: bool
    reason: str
    damaged: bool
    missing: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, fragment: _Optional[int] = ..., round: _Optional[int] = ..., accepted: bool = ..., reason: _Optional[str] = ..., damaged: bool = ..., missing: _Optional[_Iterable[int]] = ...) -> None: ...

class Fetched(_message.Message):
    __slots__ = ("fragment", "version", "codec", "size_bytes", "checksum", "reason", "since", "first_chunk", "floor")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SINCE_FIELD_NUMBER: _ClassVar[int]
    FIRST_CHUNK_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    codec: str
    size_bytes: int
    checksum: int
    reason: str
    since: int
    first_chunk: int
    floor: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., codec: _Optional[str] = ..., size_bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., reason: _Optional[str] = ..., since: _Optional[int] = ..., first_chunk: _Optional[int] = ..., floor: _Optional[int] = ...) -> None: ...

class FromShard(_message.Message):
    __slots__ = ("hello", "ready", "offered", "arrived", "made", "not_made", "published", "moved", "refused", "seal")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    OFFERED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_FIELD_NUMBER: _ClassVar[int]
    MADE_FIELD_NUMBER: _ClassVar[int]
    NOT_MADE_FIELD_NUMBER: _ClassVar[int]
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    MOVED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    hello: ShardHello
    ready: ShardReady
    offered: Offered
    arrived: Offered
    made: Made
    not_made: NotMade
    published: Published
    moved: Moved
    refused: ShardRefused
    seal: int
    def __init__(self, hello: _Optional[_Union[ShardHello, _Mapping]] = ..., ready: _Optional[_Union[ShardReady, _Mapping]] = ..., offered: _Optional[_Union[Offered, _Mapping]] = ..., arrived: _Optional[_Union[Offered, _Mapping]] = ..., made: _Optional[_Union[Made, _Mapping]] = ..., not_made: _Optional[_Union[NotMade, _Mapping]] = ..., published: _Optional[_Union[Published, _Mapping]] = ..., moved: _Optional[_Union[Moved, _Mapping]] = ..., refused: _Optional[_Union[ShardRefused, _Mapping]] = ..., seal: _Optional[int] = ...) -> None: ...

class ShardHello(_message.Message):
    __slots__ = ("protocol", "run_id", "number", "address", "key", "process")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    run_id: str
    number: int
    address: str
    key: str
    process: str
    def __init__(self, protocol: _Optional[int] = ..., run_id: _Optional[str] = ..., number: _Optional[int] = ..., address: _Optional[str] = ..., key: _Optional[str] = ..., process: _Optional[str] = ...) -> None: ...

class ShardReady(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Offered(_message.Message):
    __slots__ = ("question", "name", "session", "header", "norm", "repeated")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NORM_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    question: int
    name: str
    session: str
    header: Upload
    norm: float
    repeated: bool
    def __init__(self, question: _Optional[int] = ..., name: _Optional[str] = ..., session: _Optional[str] = ..., header: _Optional[_Union[Upload, _Mapping]] = ..., norm: _Optional[float] = ..., repeated: bool = ...) -> None: ...

class Made(_message.Message):
    __slots__ = ("fragment", "version", "file", "checksum", "public_checksum")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    file: str
    checksum: int
    public_checksum: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., file: _Optional[str] = ..., checksum: _Optional[int] = ..., public_checksum: _Optional[int] = ...) -> None: ...

class NotMade(_message.Message):
    __slots__ = ("fragment", "version", "reason")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    reason: str
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Published(_message.Message):
    __slots__ = ("fragment", "version")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ...) -> None: ...

class Moved(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class ShardRefused(_message.Message):
    __slots__ = ("name", "header", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    header: Upload
    reason: str
    def __init__(self, name: _Optional[str] = ..., header: _Optional[_Union[Upload, _Mapping]] = ..., reason: _Optional[str] = ...) -> None: ...

class ToShard(_message.Message):
    __slots__ = ("welcome", "verdict", "merge", "publish", "put_back", "goodbye", "seal")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    VERDICT_FIELD_NUMBER: _ClassVar[int]
    MERGE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    PUT_BACK_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    SEAL_FIELD_NUMBER: _ClassVar[int]
    welcome: ShardWelcome
    verdict: Verdict
    merge: MergeOrder
    publish: Published
    put_back: StoredVersion
    goodbye: ShardGoodbye
    seal: int
    def __init__(self, welcome: _Optional[_Union[ShardWelcome, _Mapping]] = ..., verdict: _Optional[_Union[Verdict, _Mapping]] = ..., merge: _Optional[_Union[MergeOrder, _Mapping]] = ..., publish: _Optional[_Union[Published, _Mapping]] = ..., put_back: _Optional[_Union[StoredVersion, _Mapping]] = ..., goodbye: _Optional[_Union[ShardGoodbye, _Mapping]] = ..., seal: _Optional[int] = ...) -> None: ...

class ShardWelcome(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[StoredVersion]
    def __init__(self, versions: _Optional[_Iterable[_Union[StoredVersion, _Mapping]]] = ...) -> None: ...

class StoredVersion(_message.Message):
    __slots__ = ("fragment", "version", "file", "checksum", "floor")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    FLOOR_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    file: str
    checksum: int
    floor: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., file: _Optional[str] = ..., checksum: _Optional[int] = ..., floor: _Optional[int] = ...) -> None: ...

class Verdict(_message.Message):
    __slots__ = ("question", "reason", "damaged", "unhealthy", "unmerged")
    QUESTION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    DAMAGED_FIELD_NUMBER: _ClassVar[int]
    UNHEALTHY_FIELD_NUMBER: _ClassVar[int]
    UNMERGED_FIELD_NUMBER: _ClassVar[int]
    question: int
    reason: str
    damaged: bool
    unhealthy: bool
    unmerged: bool
    def __init__(self, question: _Optional[int] = ..., reason: _Optional[str] = ..., damaged: bool = ..., unhealthy: bool = ..., unmerged: bool = ...) -> None: ...

class MergeOrder(_message.Message):
    __slots__ = ("fragment", "version", "round", "shares", "outer_lr", "outer_momentum", "presence", "tokens")
    FRAGMENT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    OUTER_LR_FIELD_NUMBER: _ClassVar[int]
    OUTER_MOMENTUM_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    fragment: int
    version: int
    round: int
    shares: _containers.RepeatedCompositeFieldContainer[OrderedShare]
    outer_lr: float
    outer_momentum: float
    presence: float
    tokens: int
    def __init__(self, fragment: _Optional[int] = ..., version: _Optional[int] = ..., round: _Optional[int] = ..., shares: _Optional[_Iterable[_Union[OrderedShare, _Mapping]]] = ..., outer_lr: _Optional[float] = ..., outer_momentum: _Optional[float] = ..., presence: _Optional[float] = ..., tokens: _Optional[int] = ...) -> None: ...

class OrderedShare(_message.Message):
    __slots__ = ("name", "session", "at_step", "weight", "base")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    AT_STEP_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    name: str
    session: str
    at_step: int
    weight: float
    base: int
    def __init__(self, name: _Optional[str] = ..., session: _Optional[str] = ..., at_step: _Optional[int] = ..., weight: _Optional[float] = ..., base: _Optional[int] = ...) -> None: ...

class ShardGoodbye(_message.Message):
    __slots__ = ("reason", "over")
    REASON_FIELD_NUMBER: _ClassVar[int]
    OVER_FIELD_NUMBER: _ClassVar[int]
    reason: str
    over: bool
    def __init__(self, reason: _Optional[str] = ..., over: bool = ...) -> None: ...
