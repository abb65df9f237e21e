"""Train a model that FSDP2 divides between processes, in a loop of your own, and resume it with any number of them.

    torchrun --nproc-per-node 2 examples/sharded_loop.py --steps 10
    torchrun --nproc-per-node 3 examples/sharded_loop.py    # continues after step 10

The data and the model are small and made on the spot; on GPUs, use NCCL and one GPU per process, as below. The key and
the step ledger are in FOLDER.secret. Keep them as long as the run may be resumed, and never share them.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import dpoptim
from dpoptim.data import whole_state
from dpoptim.integrations.run_identity import run_header


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("sharded-run"), help="checkpoint (default: sharded-run)")
    parser.add_argument("--steps", type=int, default=30, help="stop after this step of 30 (default: 30)")
    options = parser.parse_args()
    checkpoint, secret = options.folder / "checkpoint.pt", Path(f"{options.folder}.secret")

    cuda = torch.cuda.is_available()
    distributed.init_process_group("nccl" if cuda else "gloo")
    is_first = distributed.get_rank() == 0
    device = torch.device("cuda", distributed.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    # All processes have the same data and start with the same weights.
    torch.manual_seed(0)
    inputs = torch.randn(2000, 20)
    train = TensorDataset(inputs, (inputs[:, 0] + inputs[:, 1] > 0).long())
    model = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)

    # Loader and optimizer come after fully_shard, with the key of the run.
    plan = dpoptim.PrivacyPlan(num_examples=2000, batch_size=200, steps=30, sampling=dpoptim.Poisson())
    plan = plan.calibrate(epsilon=3.0, delta=1e-5)
    if is_first:
        dpoptim.NoiseKey.load_or_create(secret / "noise.key")
    distributed.barrier()
    key = dpoptim.NoiseKey.load_or_create(secret / "noise.key")
    loader = dpoptim.private_loader(train, plan, key=key)
    optimizer = dpoptim.scale_then_privatize(model, plan, lr=1e-2, key=key)
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location="cpu", weights_only=False)
        set_model_state_dict(model, state["model"], options=StateDictOptions(full_state_dict=True))
        optimizer.load_state_dict(state["optimizer"])
        loader.load_state_dict(state["loader"])
    if is_first:
        header = run_header(optimizer, settings={}, data=None)
        ledger = dpoptim.privacy.StepLedger.open(secret / "noise.steps", header, step=optimizer.mechanism.step or None)
        optimizer.mechanism.before_step = ledger.before_step

    for rows, labels in loader:
        cross_entropy(model(rows.to(device)), labels.to(device), reduction="none").sum().backward()
        optimizer.step()
        if optimizer.mechanism.step >= options.steps:
            break

    # whole_state gathers the parts in all processes; one of them writes, and replaces the file at once.
    state = whole_state(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
    )
    if is_first:
        options.folder.mkdir(exist_ok=True)
        torch.save(state, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").replace(checkpoint)
    with torch.no_grad():  # also in all processes
        accuracy = (model(inputs.to(device)).argmax(1).cpu() == train.tensors[1]).float().mean().item()
    if is_first:
        print(f"after step {optimizer.mechanism.step}: accuracy {accuracy:.3f}; saved {checkpoint}")
        print(optimizer.plan.statement())
    distributed.barrier()  # a process that exits while others still communicate may abort
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
