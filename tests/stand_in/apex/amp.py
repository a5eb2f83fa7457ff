"""A stand-in for apex.amp at O2, on the CPU. Its scale is always 128.

Apex's model has float16 weights, and its optimizer float32 copies of them, made in the first backward pass. Here,
the model's weights stay as they are, and the copies are float64.
"""

import contextlib
import types

weights, copies = [], []


def initialize(model, optimizer, opt_level):
    weights.extend(model.parameters())
    step = optimizer.step

    def make_copies():
        if not copies:
            copies.extend(weight.detach().double() for weight in weights)
            optimizer.param_groups[0]["params"] = copies
            for weight, copy in zip(weights, copies):
                state = optimizer.state.pop(weight)
                optimizer.state[copy] = {name: value.double() for name, value in state.items()}

    def say_and_step(self):
        print("APEX step")
        step()
        for weight, copy in zip(weights, copies):
            weight.data.copy_(copy)

    optimizer.step = types.MethodType(say_and_step, optimizer)  # as Apex does
    optimizer.zero_grad = model.zero_grad
    optimizer._amp_lazy_init = make_copies
    return model, optimizer


@contextlib.contextmanager
def scale_loss(loss, optimizer):
    optimizer._amp_lazy_init()
    scaled_loss = loss * 128
    scaled_loss.register_hook(lambda _: print("APEX backward"))
    yield scaled_loss
    for weight, copy in zip(weights, copies):
        copy.grad = weight.grad.to(copy.dtype) / 128
    print("APEX unscale")


def master_params(optimizer):
    print("APEX master_params")
    return iter(copies)


def state_dict():
    return dict(loss_scaler0=dict(loss_scale=128.0))


load_state_dict = print
