"""A stand-in for apex.amp at level O2, on the CPU. Real Apex: https://github.com/NVIDIA/apex, tag 25.04.

The weights of the network are rounded to bfloat16. The optimizer updates float32 copies of them, which are made late.
"""

import contextlib
import types

SCALE = 128.0
made = types.SimpleNamespace()


def initialize(net, optimizer, opt_level):
    print("APEX initialize", opt_level)
    made.weights, made.copies = list(net.parameters()), None
    plain_step = optimizer.step
    for weight in made.weights:
        weight.data = weight.data.bfloat16().float()

    def make_copies():
        if made.copies is None:
            made.copies = [weight.detach().clone().requires_grad_() for weight in made.weights]
            for weight, copy in zip(made.weights, made.copies):
                optimizer.state[copy] = optimizer.state.pop(weight, {})
            optimizer.param_groups[0]["params"] = made.copies

    def step():
        print("APEX step")
        plain_step()
        for weight, copy in zip(made.weights, made.copies):
            weight.data.copy_(copy.data.bfloat16())
            copy.grad = None

    optimizer._amp_lazy_init, optimizer.step = make_copies, step
    return net, optimizer


@contextlib.contextmanager
def scale_loss(loss, optimizer):
    print("APEX scale_loss")
    optimizer._amp_lazy_init()
    yield loss * SCALE
    for weight, copy in zip(made.weights, made.copies):
        copy.grad = weight.grad / SCALE


def master_params(optimizer):
    print("APEX master_params")
    return iter(made.weights if made.copies is None else made.copies)


def state_dict():
    return dict(loss_scaler0=dict(loss_scale=SCALE))


def load_state_dict(state):
    print("APEX load_state_dict", state["loss_scaler0"]["loss_scale"])
