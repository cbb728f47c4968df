"""Entry points. They register names and import neither TPDE nor PyTorch. They never raise: engines execute them unguarded."""

from __future__ import annotations

import logging

#: The name of the backend: ``WeightTransferConfig(backend="tpde")``.
BACKEND = "tpde"


def vllm() -> None:
    """Registers both halves of the backend. May be called several times per process."""
    try:
        from vllm.distributed.weight_transfer import factory
    except Exception as error:  # this release has no weight transfer, or cannot be imported here
        logging.getLogger(__name__).debug("tpde is not registered with vLLM: %s", error)
        return
    for name, module, kind in (
        ("WeightTransferEngineFactory", "tpde_engines.vllm_worker", "Engine"),
        ("WeightTransferTrainerFactory", "tpde_engines.vllm_trainer", "TrainerEngine"),
    ):
        try:
            getattr(factory, name).register_engine(BACKEND, module, kind)
        except Exception as error:  # registered before, or this release has no such factory
            logging.getLogger(__name__).debug("tpde is not registered with %s of vLLM: %s", name, error)
