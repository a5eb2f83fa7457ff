"""TROUBLESHOOTING.md: each cause of weights that differ ends a run of our scripts, and rounding does not."""

import pytest
from conftest import in_group, train
from editing import SMALL_MODEL, copy_script
from pages import block

# Edits of ddp_launch_train.py: (what is replaced, by what).
CALL, BACKWARD, STEP, ZERO = "(args, ddp_model", "loss.backward()", "optimizer.step()", "optimizer.zero_grad()"
WEIGHTS = "model.parameters()"
OPTIMIZER = f"    return torch.optim.SGD({WEIGHTS}"
OWN_GRADIENT = "weight.grad, = torch.autograd.grad(loss, weight, retain_graph=True)"
OWN_SCALE = f"""    args.scale = nn.Parameter(torch.ones(10))
    return torch.optim.SGD([dict(params={WEIGHTS}), dict(params=args.scale)]"""
CAUSES = {
    "model(images) at a tiny rate": [(CALL, "(args, model"), ("lr, momentum=0.9", "1e-5, momentum=0.9")],
    "DDP(model)(images)": [(CALL, "(args, DDP(model)")],
    "a method other than forward": [(CALL, "(args, lambda images: ddp_model.module.forward(images)")],
    "a weight outside of the model": [(OPTIMIZER, OWN_SCALE), ("outputs.float()", "outputs * args.scale")],
    "a learning rate of each rank": [(STEP, f"optimizer.param_groups[0]['lr'] = loss.item() / 50; {STEP}")],
    "two backward calls": [(BACKWARD, f"loss.backward(retain_graph=True); {BACKWARD}")],
    "gradients from torch.autograd.grad": [(BACKWARD, f"for weight in {WEIGHTS}: {OWN_GRADIENT}")],
    "a model that is converted and converted back": [(ZERO, f"{ZERO}; model.double(); model.float()")],
    "noise of each rank": [(STEP, f"{STEP}; [weight.data.mul_(torch.rand(()) + 1) for weight in {WEIGHTS}]")],
}


@pytest.mark.parametrize("cause", CAUSES)
def test_different_weights_end_the_run_and_are_not_saved(cause, tmp_path):
    copy_script(tmp_path, "ddp_launch_train", SMALL_MODEL, *CAUSES[cause])
    finished = train(tmp_path, 2)
    assert finished.returncode != 0 and "after epoch 1, the weights of the processes differ: " in finished.stdout
    assert not (tmp_path / "run.pt").exists()


def test_weights_of_all_kinds_are_compared_on_all_ranks_but_for_rounding(tmp_path):
    copy_script(tmp_path, "ddp_launch_train")
    in_group(2, tmp_path, """
from ddp_launch_train import weights_differ

def differ(weight):
    return weights_differ(torch.optim.SGD([nn.Parameter(weight, requires_grad=False)]), "cpu")

generator = torch.Generator().manual_seed(1)
weight, noise = torch.randn(2, 30, 4, generator=generator)
imaginary, uint8 = weight * 1j, torch.arange(99, dtype=torch.uint8)
for kind in weight, weight.T, weight.double(), weight.half(), imaginary, uint8, torch.zeros(3):
    assert differ(kind + rank) and not differ(kind)
assert differ(imaginary * (1 + rank))
assert not differ(weight * (1 + rank * 1e-7 * noise))  # float32 has a precision of 1.2e-7
""")


def test_one_rank_prepares_the_data(tmp_path):
    prepare_data = "prepare_data = lambda: open('prepared', 'x')"  # fails if the file is there
    in_group(2, tmp_path, f"from filelock import FileLock\n{prepare_data}\n{block('prepare')}")
