"""The recipe's `learning.correction`: presets under the names people know, and the keys they stand for.

What each key computes stands in `learning/correction.py`; docs/correction.md has formulas and sources. No
torch here.
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

BOUNDS = {
    "weight": ("weight_bounds", "weight_outside"),
    "reject": ("reject_bounds",),
}  # keys that apply only where there are weights, or rejection


Bound = Annotated[float, Field(allow_inf_nan=True)]  # inf: no bound


class CorrectionConfig(Section):
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
    ] = "none"
    mode: Literal["bypass", "decoupled"] = Field(
        "bypass",
        description="what the clipped ratio is taken to: bypass: the rollout's logprobs; decoupled: the learner's own before the update",
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
        description="leave out tokens, or responses by their ratio, the geometric mean of their tokens' ratios, or their mean k3",
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
        for (
            kind,
            keys,
        ) in BOUNDS.items():  # a preset's bounds are for its own kind of weight, and mean nothing for another
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
                f"reject_bounds = {list(self.reject_bounds)}: a k3 divergence has only an upper bound; write "
                f"[0, {self.reject_bounds[1]}]"
            )
        if self.weight != "none" and self.mode == "bypass":
            raise ValueError(
                f"weight = {self.weight!r} needs mode: decoupled; in bypass mode the clipped ratio already "
                "is learner / rollout"
            )
        if self.normalise and self.weight == "none":
            raise ValueError("normalise = true needs weights to normalise: set weight to token or sequence")
        return self

    def _keys_apply(self) -> None:
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
                    value, choices = (
                        getattr(self, key),
                        ", ".join(get_args(type(self).model_fields[kind].annotation)[1:]),
                    )
                    shown = list(value) if isinstance(value, tuple) else value
                    raise ValueError(
                        f"{key} = {shown!r} does not apply where {kind} = 'none'; leave it out, or set "
                        f"{kind} to one of {choices}"
                    )
