"""A migration from Opacus: change the import, keep the loop.

    from dpoptim.integrations.opacus import BatchMemoryManager, ModuleValidator, PrivacyEngine

Names, units and defaults are those of Opacus 1.x; clipping, noise, sampling and accounting are those of dpoptim.
Unsupported options are refused. See docs/from-opacus.md.

`DPRNN`, `DPLSTM`, `DPGRU` and `DPMultiheadAttention` are the layers of `torch.nn`, which need no replacement.
"""

from torch.nn import GRU as DPGRU
from torch.nn import LSTM as DPLSTM
from torch.nn import RNN as DPRNN
from torch.nn import MultiheadAttention as DPMultiheadAttention

from dpoptim.integrations.opacus.engine import PrivacyEngine, PrivateTraining, make_private, make_private_with_epsilon
from dpoptim.integrations.opacus.loader import BatchMemoryManager, DPDataLoader
from dpoptim.integrations.opacus.models import ModuleValidator
from dpoptim.integrations.opacus.optimizers import DPOptimizer

__all__ = [
    "BatchMemoryManager",
    "DPDataLoader",
    "DPGRU",
    "DPLSTM",
    "DPMultiheadAttention",
    "DPOptimizer",
    "DPRNN",
    "ModuleValidator",
    "PrivacyEngine",
    "PrivateTraining",
    "make_private",
    "make_private_with_epsilon",
]
