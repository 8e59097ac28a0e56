"""FP8 learning: the projections that a rollout quantises multiply in FP8 in the learner, too."""

from paceline.policy.decoder import Decoder, ExpertFeedForward
from paceline.policy.products import Fp8Product
from paceline.precision.weights import quantised_parameters


def use_fp8(policy: Decoder, base_layers: int = 0) -> None:
    """Makes all layers' projections multiply in FP8, except in the first and last `base_layers` layers."""
    product = Fp8Product()
    for name, _ in quantised_parameters(policy, base_layers):
        path = name.removesuffix(".weight")
        module = policy.get_submodule(path if name.endswith(".weight") else path.rpartition(".")[0])
        assert hasattr(module, "product") or isinstance(module, ExpertFeedForward)
        module.product = product
