"""I wrote Adam myself for a half network. After one step the weights are NaN.

Its moments have the weights' format. The squares of small gradients are 0 there, and so is 1e-8: the step divides by 0.
"""

import minamp
import minamp.nn.functional as F
from gallery.parts import digits, mlp
from minamp import optim


class MyAdam(optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def _check(self, group):
        pass

    @minamp.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["m"], state["v"] = minamp.zeros_like(p), minamp.zeros_like(p)  # the fault
                state["step"] += 1
                m, v = state["m"], state["v"]
                m.mul_(b1).add_(p.grad * (1 - b1))
                v.mul_(b2).add_(p.grad * p.grad * (1 - b2))
                m_hat, v_hat = m / (1 - b1 ** state["step"]), v / (1 - b2 ** state["step"])
                p.sub_(group["lr"] * m_hat / (v_hat.sqrt() + group["eps"]))  # the fault


def broken():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10).half()
    optimizer = MyAdam(model.parameters(), lr=1e-3)  # the fault

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)


def repaired():
    minamp.manual_seed(0)
    x, y = digits(32)
    model = mlp(784, 64, 10).half()
    optimizer = optim.Adam(model.parameters(), lr=1e-3, master_weights=True)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.half()).float(), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    return dict(step=step, model=model, optimizer=optimizer, scaler=None)
