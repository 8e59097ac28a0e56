"""The weights that vLLM's models start with where the policy's folder has none.

vLLM's own format for that, `dummy`, holds for every model that is loaded: a drafter would start with random
weights too, without an LM head of its own, and share the policy's.
"""

import copy
from typing import Any

# The format's name for vLLM (`load_format`).
POLICY_LATER = "paceline-policy-later"


def register_loader() -> None:
    """Teaches vLLM the format: a drafter comes from its folder, the policy with its first update."""
    from vllm.model_executor.model_loader import DefaultModelLoader, DummyModelLoader, register_model_loader

    @register_model_loader(POLICY_LATER)
    class PolicyLaterLoader(DummyModelLoader):
        def load_weights(self, model: Any, model_config: Any) -> None:
            if model_config.runner_type != "draft":
                super().load_weights(model, model_config)
                return
            usual = copy.copy(self.load_config)
            usual.load_format = "auto"
            DefaultModelLoader(usual).load_weights(model, model_config)
