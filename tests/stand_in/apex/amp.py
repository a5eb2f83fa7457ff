"""A stand-in for apex.amp at level O2, on the CPU. It has two sets of weights: `net` has them rounded to bfloat16,
and the optimizer updates float32 copies. Like Apex, it makes the copies late, in optimizer._amp_lazy_init()."""

import contextlib

weights, copies = [], []


def initialize(net, optimizer, opt_level):
    weights.extend(net.parameters())
    plain_step = optimizer.step
    for weight in weights:
        weight.data = weight.data.bfloat16().float()

    def make_copies():
        if not copies:
            copies.extend(weight.detach().clone().requires_grad_() for weight in weights)
            for weight, copy in zip(weights, copies):
                optimizer.state[copy] = optimizer.state.pop(weight, {})
            optimizer.param_groups[0]["params"] = copies

    def step():
        print("APEX step")
        plain_step()
        for weight, copy in zip(weights, copies):
            weight.data.copy_(copy.data.bfloat16())

    optimizer._amp_lazy_init, optimizer.step = make_copies, step
    return net, optimizer


@contextlib.contextmanager
def scale_loss(loss, optimizer):
    print("APEX scale_loss")
    optimizer._amp_lazy_init()
    yield loss * 128
    for weight, copy in zip(weights, copies):
        copy.grad = weight.grad / 128


def master_params(optimizer):
    print("APEX master_params")
    return iter(copies)


def state_dict():
    return dict(loss_scaler0=dict(loss_scale=128.0))


def load_state_dict(state):
    assert state == state_dict()
