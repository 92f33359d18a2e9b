"""Frees the memory of models that are no longer used."""

import gc


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Frees the memory of LLMs to which no reference is left. There is no Ray to shut down."""
    import torch

    gc.unfreeze()  # the LLM's constructor has frozen the objects that existed then
    gc.collect()
    gc.freeze()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
