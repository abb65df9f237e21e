"""What a model predicts, and the loss of each example."""

from dpoptim.integrations.losses.batch_losses import losses_for
from dpoptim.integrations.losses.tasks import Outcome, Task

__all__ = ["Outcome", "Task", "losses_for"]
