"""Commands that help to choose settings: look at a link, and do the arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from tyro.conf import UseAppendAction, arg

from skerry.cli.command import Command, OptionalPath, OptionalText, PositionalText, TlsGroup, TlsOptions
from skerry.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class PlanCommand(Command):
    """Choose H, P, τ, K and codecs for a model, its islands and their links (docs/several-machines.md).

    For example: skerry plan --params 350m --island 8xh100 --island 0.8s@500:40 --link 1000:20
    """

    params: str
    """Parameters of the model, such as 350m or 1.2b."""
    island: Annotated[tuple[str, ...], UseAppendAction, arg(metavar="DEVICES[@LINK]", help_behavior_hint="(required)")] = ()
    """Devices of an island, such as 8xh100, or its step time, such as 0.8s; @500:40 gives it its own link. Repeatable."""
    link: OptionalText = None
    """Link of all islands: Mbit/s and round trip in ms, such as 500:40, or down/up, such as 500/100:40."""
    measured: OptionalPath = None
    """File of `skerry doctor --json`, in place of --link."""
    tokens_per_step: str = "524288"
    """Tokens in one step of an island whose devices are given."""

    def execute(self) -> None:
        from skerry.plan.text import island_of, link_of, measured_link, number_of, plan_lines

        if not self.island:
            raise ConfigError("skerry plan needs --island, once for each island")
        parameters = number_of(self.params, "--params")
        tokens = number_of(self.tokens_per_step, "--tokens-per-step")
        link = measured_link(self.measured) if self.measured else link_of(self.link) if self.link else None
        islands = [island_of(text, number, parameters, tokens, link) for number, text in enumerate(self.island)]
        print(plan_lines(parameters, islands))


@dataclass(frozen=True, kw_only=True)
class DoctorCommand(Command):
    """Check the way to a syncer: reachable, TLS, clock, round trip, bandwidth. Exits with 1 if something is wrong."""

    address: PositionalText
    """host:port of the syncer, or its run folder."""
    connections: int = 4
    """Connections to measure with; use as many as an island will."""
    seconds: float = 2.0
    """Length of each measurement."""
    json: OptionalPath = None
    """Write the result to this file, for skerry plan --measured."""
    tls: TlsGroup = field(default_factory=TlsOptions)

    def execute(self) -> None:
        import json

        from skerry.admin import syncer_address
        from skerry.plan.doctor import examine

        if self.connections < 1 or self.seconds <= 0:
            raise ConfigError("--connections must be at least 1 and --seconds more than 0")
        found = examine(syncer_address(self.address), self.tls.files(), self.connections, self.seconds, print)
        if self.json:
            self.json.write_text(json.dumps(found.to_json(), indent=1) + "\n")
        if not found.well:
            raise SystemExit(1)
