"""A migration from Opacus: change the import, keep the loop.

    from dpoptim.integrations.opacus import BatchMemoryManager, ModuleValidator, PrivacyEngine

Names, units and defaults are those of Opacus 1.x (`max_grad_norm`, `noise_multiplier`, `poisson_sampling`,
`loss_reduction="mean"`, add-remove neighbours, a sampling rate of 1/len(data_loader)); clipping, noise, sampling and
accounting are dpoptim's. What cannot be carried over is refused in one line. docs/from-opacus.md shows both, side by
side.

`DPRNN`, `DPLSTM`, `DPGRU` and `DPMultiheadAttention` are the layers of `torch.nn`, which need no replacement here.
"""

from torch.nn import GRU as DPGRU
from torch.nn import LSTM as DPLSTM
from torch.nn import RNN as DPRNN
from torch.nn import MultiheadAttention as DPMultiheadAttention

from dpoptim.integrations.opacus.engine import PrivacyEngine
from dpoptim.integrations.opacus.loader import BatchMemoryManager, DPDataLoader
from dpoptim.integrations.opacus.modules import ModuleValidator
from dpoptim.integrations.opacus.optimizers import DPOptimizer
from dpoptim.integrations.opacus.private import Private, make_private, make_private_with_epsilon

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
    "Private",
    "make_private",
    "make_private_with_epsilon",
]
