"""Private training with Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpoptim.integrations.hugging_face.arguments import PrivacyArguments

if TYPE_CHECKING:
    from dpoptim.integrations.hugging_face.trainer import PrivateTrainer

__all__ = ["PrivacyArguments", "PrivateTrainer"]


def __getattr__(name: str) -> Any:
    """Import `PrivateTrainer` on first use: it needs transformers and accelerate."""
    if name != "PrivateTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import accelerate  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"PrivateTrainer needs transformers and accelerate ({error}); run: pip install transformers accelerate"
        ) from error
    from dpoptim.integrations.hugging_face.trainer import PrivateTrainer

    return PrivateTrainer
