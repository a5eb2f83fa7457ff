"""A stand-in for apex.amp, on the CPU. Its scale is always 128, and it makes no copies of the weights (as O1)."""

import contextlib
import types

weights = []
load_state_dict = print


def initialize(model, optimizer, opt_level):
    weights.extend(model.parameters())
    step = optimizer.step
    optimizer.step = types.MethodType(lambda self: (print("APEX step"), step()), optimizer)  # as Apex does
    optimizer._amp_lazy_init = lambda: print("APEX lazy init")
    return model, optimizer


@contextlib.contextmanager
def scale_loss(loss, optimizer):
    scaled_loss = loss * 128
    scaled_loss.register_hook(lambda _: print("APEX backward"))
    yield scaled_loss
    for weight in weights:
        weight.grad /= 128
    print("APEX unscale")


def master_params(optimizer):
    return print("APEX master_params") or iter(weights)


def state_dict():
    return dict(loss_scaler0=dict(loss_scale=128.0))
