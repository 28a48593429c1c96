"""A command with fake components, for tests of the decoder alone."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from lmtool.config.base import Config
from lmtool.config.decode import Auto
from lmtool.config.registry import Choice, component


class EngineConfig(Config):
    adjustable_fields: ClassVar[tuple[str, ...]] = ("oil",)
    name: str = Field(description="Which engine.")


@component("fake_engine", "steam", builder="tests.config.fakes:EngineConfig")
class SteamConfig(EngineConfig):
    """Steam."""

    name: Literal["steam"] = Field("steam", description="Steam.")
    pressure: float = Field(2.5, gt=0, lt=10, description="Pressure in bar.")
    boilers: int = Field(1, ge=1, description="Boilers.")
    oil: float = Field(0.1, ge=0, description="Oil in litres.")

    def parts(self) -> dict[str, Any]:
        return {"wheels": {"name": "round", "spokes": 7}}


@component("fake_engine", "diesel", builder="tests.config.fakes:EngineConfig")
class DieselConfig(EngineConfig):
    """Diesel."""

    name: Literal["diesel"] = Field("diesel", description="Diesel.")
    cylinders: int = Field(4, ge=1, description="Cylinders.")

    def parts(self) -> dict[str, Any]:
        return {"paint": {"name": "colour", "layers": self.cylinders}}


class TreadConfig(Config):
    depth: float = Field(1.0, gt=0, description="Depth in millimetres.")


@component("fake_wheels", "round", builder="tests.config.fakes:EngineConfig")
class WheelsConfig(Config):
    """Round wheels."""

    name: Literal["round"] = Field("round", description="Round.")
    spokes: int = Field(5, ge=3, description="Spokes.")
    tread: TreadConfig = Field(TreadConfig(), description="The tread.")


@component("fake_paint", "colour", builder="tests.config.fakes:EngineConfig")
class PaintConfig(Config):
    """Paint."""

    name: Literal["colour"] = Field("colour", description="Colour.")
    layers: int = Field(1, ge=1, description="Layers.")


class DriveConfig(Config):
    """A command."""

    auto: ClassVar[dict[str, Auto]] = {
        "engine": Auto(("checkpoint",), hint="set checkpoint=", agrees=True),
        "wheels": Auto(("engine.parts.wheels",), hint="set wheels=round"),
        "paint": Auto(("engine.parts.paint", {"name": "colour", "layers": 9})),
    }

    seed: int = Field(0, ge=0, description="Seed.")
    road: str = Field(description="Road that is taken.")
    mode: Literal["fast", "slow"] = Field("fast", description="Mode.")
    stops: tuple[str, ...] = Field((), description="Stops by name.")
    minutes: float | None = Field(None, gt=0, description="Minutes.")
    lights: bool = Field(False, description="Lights.")
    engine: Annotated[EngineConfig, Choice("fake_engine")] = Field(description="The engine.")
    wheels: Annotated[WheelsConfig, Choice("fake_wheels")] = Field(description="The wheels.")
    paint: Annotated[PaintConfig, Choice("fake_paint")] = Field(description="The paint.")
