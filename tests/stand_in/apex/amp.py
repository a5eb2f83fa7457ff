"""A stand-in for apex.amp at O2, on the CPU: the network has weights in bfloat16, the optimizer float32 copies."""

import contextlib

weights, copies = [], []


def initialize(net, optimizer, opt_level):
    weights.extend(net.parameters())
    optimizer._amp_lazy_init = lambda: make_copies(optimizer)
    optimizer.register_step_post_hook(update_weights)
    return net, optimizer


def make_copies(optimizer):
    if not copies:
        copies.extend(weight.detach().clone().requires_grad_() for weight in weights)
        for weight, copy in zip(weights, copies):
            optimizer.state[copy] = optimizer.state.pop(weight)
        optimizer.param_groups[0]["params"] = copies


def update_weights(*_):
    print("APEX step")
    for weight, copy in zip(weights, copies):
        weight.data.copy_(copy.data.bfloat16())


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


load_state_dict = print
