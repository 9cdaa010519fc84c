"""What operators may know of a running engine: its memory, its use, how it started."""

from __future__ import annotations

import msgspec

from engine.client import EngineDeadError, EngineInfo, EngineStats, SpeculationInfo
from engine.request import RequestLimits
from server.errors import UnavailableError
from server.service.served_model import ServedModel
from server.service.state import ServerState


class UnitBytesBody(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of one token's keys and values, and of one running request's state.

    With a draft method these have its part in them: of `gdn_per_slot`, verify_scratch_per_row for
    each row of a request in a step. `draft_per_slot`: what the method keeps of a request.
    """

    kv_per_token: int
    gdn_per_slot: int
    sampling_per_slot: int
    verify_scratch_per_row: int
    draft_per_slot: int


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes that the caches are made of; `unit_bytes` is null where nothing was planned."""

    page_size: int
    unit_bytes: UnitBytesBody | None


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """How many there are for requests, and how many requests own."""

    capacity: int
    used: int


class MemoryBody(msgspec.Struct, frozen=True, kw_only=True):
    """The memory plan in bytes.

    `parts` fit into `budget_bytes`, which is a share of what was free at the start.
    """

    free_bytes: int
    budget_bytes: int
    planned_bytes: int
    parts: dict[str, int]


class CacheStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /v1/cache/status."""

    geometry: Geometry
    pages: Use
    tokens: Use
    slots: Use
    memory: MemoryBody | None


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The body of /server_info. `startup_s`: seconds of each phase, ready is all of them.

    `speculation` is null where no drafts are made.
    """

    version: str
    model: str
    model_type: str
    dtype: str
    device: str
    limits: RequestLimits
    max_running_requests: int
    startup_s: dict[str, float]
    num_recompilations: int
    speculation: SpeculationInfo | None


async def read_stats(state: ServerState) -> tuple[ServedModel, EngineStats]:
    """The loaded model and its counters, also while the server drains.

    Raises:
        UnavailableError: the model is still loading, or its engine has died.
    """
    model = state.loaded_model
    if model is None:
        return state.require_model(), EngineStats()
    try:
        return model, await model.client.stats()
    except EngineDeadError as error:
        raise UnavailableError("The engine has stopped.") from error


def cache_status(info: EngineInfo, stats: EngineStats) -> CacheStatus:
    """Capacities, their use and the plan."""
    plan, units, memory = info.memory, None, None
    if plan is not None:
        units = UnitBytesBody(
            kv_per_token=plan.units.kv_per_token,
            gdn_per_slot=plan.units.gdn_per_slot,
            sampling_per_slot=plan.units.sampling_per_slot,
            verify_scratch_per_row=plan.units.verify_scratch_per_row,
            draft_per_slot=plan.units.draft_per_slot,
        )
        memory = MemoryBody(
            free_bytes=plan.free_bytes,
            budget_bytes=plan.budget_bytes,
            planned_bytes=plan.used_bytes,
            parts=plan.parts,
        )
    num_used, page_size = stats.num_pages_used, info.page_size
    return CacheStatus(
        geometry=Geometry(page_size=page_size, unit_bytes=units),
        pages=Use(capacity=info.num_pages, used=num_used),
        tokens=Use(capacity=info.num_pages * page_size, used=num_used * page_size),
        slots=Use(capacity=info.num_slots, used=stats.num_slots_used),
        memory=memory,
    )


def server_info(model: ServedModel, stats: EngineStats) -> ServerInfo:
    """What is served and how it came up."""
    info = model.client.info
    return ServerInfo(
        version=info.version,
        model=model.names[0],
        model_type=info.model_type,
        dtype=info.dtype,
        device=info.device,
        limits=info.limits,
        max_running_requests=info.max_running_requests,
        startup_s=info.startup_s,
        num_recompilations=stats.num_recompilations_total,
        speculation=info.speculation,
    )
