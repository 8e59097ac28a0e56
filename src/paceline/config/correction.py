"""The recipe's `learning.correction`: presets under their usual names, and the keys they stand for.

What each key computes is in `learning/correction.py`; docs/precision.md has formulas and sources.
"""

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from paceline.config.section import Section

_TOKEN_TIS = {"mode": "decoupled", "weight": "token", "weight_bounds": [0.0, 2.0]}
_SEQ_TIS = {"mode": "decoupled", "weight": "sequence", "weight_bounds": [0.0, 2.0]}
_ICEPOP = {"mode": "decoupled", "weight": "token", "weight_bounds": [0.5, 5.0], "weight_outside": "zero"}
_GEO_RS = {"mode": "decoupled", "reject": "geometric", "reject_bounds": [0.999, 1.001]}
_K3_RS = {"mode": "decoupled", "reject": "k3", "reject_bounds": [0.0, 0.01]}

# A key that a recipe names beside the preset wins over the preset's.
CORRECTION_PRESETS: dict[str, dict[str, Any]] = {
    "none": {},
    "tis": _TOKEN_TIS,
    "token-tis": _TOKEN_TIS,
    "seq-tis": _SEQ_TIS,
    "icepop": _ICEPOP,
    "token-mis": _ICEPOP,
    "seq-mis": _SEQ_TIS | {"reject": "sequence", "reject_bounds": [0.5, 2.0]},
    "geo-rs": _GEO_RS,
    "geo-rs-token-tis": _GEO_RS | _TOKEN_TIS,
    "geo-rs-seq-tis": _GEO_RS | _SEQ_TIS,
    "k3-rs": _K3_RS,
    "k3-rs-token-tis": _K3_RS | _TOKEN_TIS,
}

# The preset of a recipe that rolls out in FP8, unless it names one or learns with exact numerics.
PRESET_OF_FP8 = "token-tis"

# Keys that apply only where there are weights, or rejection.
BOUNDS = {"weight": ("weight_bounds", "weight_outside"), "reject": ("reject_bounds",)}

# A bound of a weight or ratio; inf: none.
Bound = Annotated[float, Field(allow_inf_nan=True)]


class CorrectionConfig(Section):
    """The section `learning.correction`: correction of samples from a policy that is not the learner's."""

    preset: Literal[
        "none",
        "tis",
        "token-tis",
        "seq-tis",
        "icepop",
        "token-mis",
        "seq-mis",
        "geo-rs",
        "geo-rs-token-tis",
        "geo-rs-seq-tis",
        "k3-rs",
        "k3-rs-token-tis",
    ] = Field(
        "none",
        description="sets the keys below under a known name; a key given beside it wins; with "
        f"rollout.precision in FP8 and learning.numerics=fast the default is {PRESET_OF_FP8}",
    )
    mode: Literal["bypass", "decoupled"] = Field(
        "bypass",
        description="old logprobs of the clipped ratio: bypass: the rollout's; "
        "decoupled: the learner's own before the update",
    )
    weight: Literal["none", "token", "sequence"] = Field(
        "none", description="importance weights learner / rollout, of each token or each response"
    )
    weight_bounds: tuple[Bound, Bound] = Field((0.0, 2.0), description="[lowest, highest] weight")
    weight_outside: Literal["truncate", "zero"] = Field(
        "truncate", description="a weight outside its bounds becomes the nearest bound (TIS) or 0 (IcePop)"
    )
    normalise: bool = Field(False, description="divide the weights by their mean over the step")
    reject: Literal["none", "token", "sequence", "geometric", "k3"] = Field(
        "none",
        description="rejection sampling: leaves out tokens, or responses by their ratio, "
        "the geometric mean of their tokens' ratios, or their mean k3",
    )
    reject_bounds: tuple[Bound, Bound] = Field(
        (0.5, 2.0), description="[lowest, highest] ratio (k3: divergence) that is kept"
    )
    veto: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="leave out a response with any token's ratio below this; 0: off, 1e-4 is usual",
    )

    @model_validator(mode="before")
    @classmethod
    def _preset_values(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        preset = CORRECTION_PRESETS.get(str(given.get("preset", "none")), {})
        # A preset's bounds are for its own kind of weight, and do not apply to another.
        for kind, keys in BOUNDS.items():
            if given.get(kind, preset.get(kind)) != preset.get(kind):
                preset = {key: value for key, value in preset.items() if key not in keys}
        return preset | given

    @model_validator(mode="after")
    def _keys_fit_together(self) -> "CorrectionConfig":
        self._keys_apply()
        for key in ("weight_bounds", "reject_bounds"):
            low, high = getattr(self, key)
            if not 0 <= low <= high:
                raise ValueError(
                    f"{key} = [{low}, {high}] must be [lowest, highest] with 0 <= lowest <= highest"
                )
        if self.reject == "k3" and self.reject_bounds[0] > 0:
            raise ValueError(
                f"reject_bounds = {list(self.reject_bounds)}: a k3 divergence has only an upper bound; "
                f"write [0, {self.reject_bounds[1]}]"
            )
        if self.weight != "none" and self.mode == "bypass":
            raise ValueError(
                f"weight = {self.weight!r} needs mode: decoupled; "
                "in bypass mode the clipped ratio already is learner / rollout"
            )
        if self.normalise and self.weight == "none":
            raise ValueError("normalise = true needs weights to normalise: set weight to token or sequence")
        return self

    def _keys_apply(self) -> None:
        """Refuses keys that undo the preset, and bounds of weights or rejection that are off."""
        preset = CORRECTION_PRESETS[self.preset]
        if {"weight", "reject"} & preset.keys() and self.weight == self.reject == "none" and not self.veto:
            undone = ", ".join(f"{key} = 'none'" for key in ("weight", "reject") if key in preset)
            raise ValueError(
                f"preset = {self.preset!r} is undone by {undone} beside it, and nothing would be corrected; "
                "leave that out, or use preset: none. "
                "In a recipe with every key spelt out, delete the keys next to preset"
            )
        for kind, keys in BOUNDS.items():
            for key in keys:
                if getattr(self, kind) == "none" and not self.is_default(key):
                    value = getattr(self, key)
                    shown = list(value) if isinstance(value, tuple) else value
                    choices = ", ".join(get_args(type(self).model_fields[kind].annotation)[1:])
                    raise ValueError(
                        f"{key} = {shown!r} does not apply where {kind} = 'none'; "
                        f"leave it out, or set {kind} to one of {choices}"
                    )
