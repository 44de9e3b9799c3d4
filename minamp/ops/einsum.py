"""einsum: any sum of products, as matrix products of pairs. Written with `m` throughout, so it differentiates itself."""

import math

from minamp.numbers import unpacked
from minamp.op import LOWER_PRECISION, op


@op(policy=LOWER_PRECISION)
class einsum:
    """The sum that `equation` names: 'bij,bjk->bik', 'ii', '...ij->...ji'; any number of operands, sizes of 1 broadcast.

    Operands are contracted pair by pair from the left, each pair by one matmul (a product where nothing is summed), in
    float32 throughout, and the result is rounded once. PyTorch rounds to half after every pair, so with three operands or
    more it may overflow where this does not. RuntimeError for an equation that does not fit the operands.
    """

    def call(equation, *operands):
        operands = unpacked(operands)
        return operands, _subscripts(equation, operands)

    def forward(m, *operands, inputs, output, sizes):
        return _contract(m, inputs, operands, output, sizes)

    def vjp_operands(m, g, i, operands, operands_shape, inputs, output, sizes):
        others = [k for k in range(len(inputs)) if k != i]
        terms, arrays = [output] + [inputs[k] for k in others], [g] + [operands[k] for k in others]
        shapes = [operands_shape[k] for k in others]
        there = set(output) | {
            a
            for k, s in zip(others, shapes, strict=True)
            for a, n in zip(inputs[k], s, strict=True)
            if n == sizes[a]
        }

        def plain(labels, shape):  # of an operand whose labels all differ
            wanted = tuple(a for a, n in zip(labels, shape, strict=True) if n == sizes[a] and a in there)
            gx = _contract(m, terms, arrays, wanted, sizes)
            return m.expand(m.reshape(gx, tuple(sizes[a] if a in wanted else 1 for a in labels)), shape)

        return _on_diagonals(m, inputs[i], operands_shape[i], plain)


def _subscripts(equation, operands):
    """The labels of every operand and of the output: letters, and -n..-1 for the dimensions under '...'; and their sizes."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise RuntimeError(
            f"einsum: {equation!r} has {len(terms)} terms for {len(operands)} operands: give one tensor per term"
        )
    inputs, sizes, dots = [], {}, 0
    for k, (term, x) in enumerate(zip(terms, operands, strict=True)):
        labels = _labels(term, x.ndim, f"operand {k} of shape {x.shape}")
        dots = max(dots, sum(type(a) is int for a in labels))
        for a, n in zip(labels, x.shape, strict=True):
            if n != x.shape[labels.index(a)]:
                raise RuntimeError(
                    f"einsum: subscript {a} is repeated in {term!r}, but the sizes of {x.shape} there differ"
                )
            if n != 1 and sizes.get(a, 1) not in (1, n):
                raise RuntimeError(
                    f"einsum: subscript {a} has size {n} in operand {k}, but {sizes[a]} before: make them equal or 1"
                )
            sizes[a] = n if sizes.get(a, 1) == 1 else sizes[a]
        inputs.append(labels)
    if arrow:
        letters = len(right.replace("...", ""))
        output = _labels(right, letters + ("..." in right) * dots, "the output")
        for a in output:
            if a not in sizes or output.count(a) > 1:
                why = "more than once" if a in sizes else "in no operand"
                raise RuntimeError(f"einsum: output subscript {a} of {equation!r} appears {why}")
    else:
        flat = [a for labels in inputs for a in labels]
        output = (*range(-dots, 0), *sorted(a for a in flat if type(a) is str and flat.count(a) == 1))
    return {"inputs": inputs, "output": output, "sizes": sizes}


def _labels(term, ndim, whose):
    head, dots, tail = term.partition("...")
    if not all(a.isascii() and a.isalpha() for a in head + tail):
        raise RuntimeError(f"einsum: {term!r} may hold the letters a-z and A-Z and one '...'")
    rest = ndim - len(head + tail)
    if rest < 0 or rest and not dots:
        raise RuntimeError(
            f"einsum: {term!r} has {len(head + tail)} subscripts for {whose}: give one per dimension, or '...'"
        )
    return (*head, *range(-rest, 0), *tail)


def _contract(m, inputs, operands, output, sizes):
    """The product of the operands, summed over every label that is not in `output`."""
    terms = [_simplified(m, labels, x, sizes) for labels, x in zip(inputs, operands, strict=True)]
    labels, x = terms[0]
    for k in range(1, len(terms)):
        needed = set(output).union(*(later for later, _ in terms[k + 1 :]))
        labels, x = _pair(m, labels, x, *terms[k], needed)
    labels, x = _summed(m, labels, x, output)
    return m.permute(x, tuple(labels.index(a) for a in output))


def _simplified(m, labels, x, sizes):
    """x with each label once, and none of size 1 where another operand has more: the product broadcasts without it."""
    repeated = [a for a in labels if labels.count(a) > 1]
    while repeated:
        labels, rest, order, n = _fold(labels, x.shape, repeated[0])
        x = m.reshape(m.permute(x, order), (n * n, *rest))
        x = m.index(x, (slice(None, None, n + 1),))
        repeated = [a for a in labels if labels.count(a) > 1]
    keep = [i for i, a in enumerate(labels) if x.shape[i] == sizes[a]]
    return tuple(labels[i] for i in keep), m.reshape(x, tuple(x.shape[i] for i in keep))


def _fold(labels, shape, a):
    """Bring the first two places of label `a` to the front: the labels with a once, the other sizes, the order, a's size."""
    p = labels.index(a)
    q = labels.index(a, p + 1)
    rest = [i for i in range(len(labels)) if i not in (p, q)]
    return (a, *(labels[i] for i in rest)), tuple(shape[i] for i in rest), (p, q, *rest), shape[p]


def _on_diagonals(m, labels, shape, plain):
    """The gradient of an operand: plain(labels, shape) where the labels differ; else zeros with that on the diagonals."""
    for a in labels:
        if labels.count(a) > 1:
            once, rest, order, n = _fold(labels, shape, a)
            g = _on_diagonals(m, once, (n, *rest), plain)
            g = m.index_grad(g, (slice(None, None, n + 1),), (n * n, *rest))
            back = tuple(order.index(i) for i in range(len(order)))
            return m.permute(m.reshape(g, (n, n, *rest)), back)
    return plain(labels, shape)


def _summed(m, labels, x, needed):
    drop = tuple(i for i, a in enumerate(labels) if a not in needed)
    return tuple(a for a in labels if a in needed), m.sum(x, drop) if drop else x


def _pair(m, labels1, x1, labels2, x2, needed):
    """The product of two terms, summed over the labels that only they have: one matmul over (shared, kept, summed) labels."""
    labels1, x1 = _summed(m, labels1, x1, needed | set(labels2))
    labels2, x2 = _summed(m, labels2, x2, needed | set(labels1))
    sizes = dict(zip(labels1 + labels2, x1.shape + x2.shape, strict=True))
    batch = [a for a in labels1 if a in labels2 and a in needed]
    inner = [a for a in labels1 if a in labels2 and a not in needed]
    left = [a for a in labels1 if a not in labels2]
    right = [a for a in labels2 if a not in labels1]

    def arranged(x, labels, order, shape):
        return m.reshape(m.permute(x, tuple(labels.index(a) for a in order)), shape)

    def size(names):
        return tuple(sizes[a] for a in names)

    out = size(batch + left + right)
    if inner:
        lead, k = (math.prod(size(batch)),) if batch else (), math.prod(size(inner))
        x1 = arranged(x1, labels1, batch + left + inner, (*lead, math.prod(size(left)), k))
        x2 = arranged(x2, labels2, batch + inner + right, (*lead, k, math.prod(size(right))))
        return (*batch, *left, *right), m.reshape(m.matmul(x1, x2), out)
    x1 = arranged(x1, labels1, batch + left, size(batch + left) + (1,) * len(right))
    x2 = arranged(x2, labels2, batch + right, size(batch) + (1,) * len(left) + size(right))
    return (*batch, *left, *right), x1 * x2
