"""Private training with Hugging Face's Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpoptim.integrations.chats import tokenize_chat
from dpoptim.integrations.hugging_face.arguments import PrivacyArguments

if TYPE_CHECKING:
    from dpoptim.integrations.hugging_face.trainer import PrivateTrainer

__all__ = ["PrivacyArguments", "PrivateTrainer", "tokenize_chat"]

_TRANSFORMERS = ((5, 3), (6,))  # PrivateTrainer replaces private methods of Trainer, which other versions may not have


def __getattr__(name: str) -> Any:
    """Import `PrivateTrainer` on first use: it needs transformers and accelerate."""
    if name != "PrivateTrainer":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import accelerate  # noqa: F401
        import transformers
    except ImportError as error:
        raise ImportError(
            f"PrivateTrainer needs transformers and accelerate ({error}). Run: pip install 'dpoptim[train]'"
        ) from error
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not _TRANSFORMERS[0] <= version < _TRANSFORMERS[1]:
        raise ImportError(
            f"PrivateTrainer does not support transformers {transformers.__version__}. Run: pip install "
            "'transformers>=5.3,<6'"
        )
    from dpoptim.integrations.hugging_face.trainer import PrivateTrainer

    return PrivateTrainer
