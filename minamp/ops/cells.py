"""What one step of a recurrent network does with its gates, which lie side by side in torch's order: rounded once, at the end.

The products before them are made by linear, in nn/recurrent.py.
"""

from minamp.op import NOT_LISTED, op


def _part(m, x, k, n):
    """The k-th of n equal parts of x along its last dimension."""
    size = x.shape[-1] // n
    return m.index(x, (..., slice(k * size, (k + 1) * size)))


def _parts(m, x, n):
    return [_part(m, x, k, n) for k in range(n)]


def _slope(s):
    """That of a sigmoid, given its value."""
    return s * (1.0 - s)


@op(policy=NOT_LISTED)
class lstm_state:
    """sigmoid(f) * c + sigmoid(i) * tanh(g) of gates (..., 4 * H), which hold i, f, g, o, and of the state c (..., H)."""

    def forward(m, gates, c):
        i, f, z = _lstm(m, gates)
        return f * c + i * z

    def shared_open(m, g, gates):
        return _lstm(m, gates)

    def vjp_gates(m, g, c, open):
        i, f, z = open
        slopes = [g * z * _slope(i), g * c * _slope(f), g * i * (1.0 - z * z), m.zeros_like(g)]
        return m.cat(slopes, len(g.shape) - 1)

    def vjp_c(m, g, open):
        return g * open[1]


def _lstm(m, gates):
    """sigmoid(i), sigmoid(f), tanh(g)."""
    return m.sigmoid(_part(m, gates, 0, 4)), m.sigmoid(_part(m, gates, 1, 4)), m.tanh(_part(m, gates, 2, 4))


@op(policy=NOT_LISTED)
class lstm_output:
    """sigmoid(o) * tanh(c) of the gates and of the new state c: an LSTM's h."""

    def forward(m, gates, c):
        return m.sigmoid(_part(m, gates, 3, 4)) * m.tanh(c)

    def shared_factors(m, g, gates, c):
        return m.sigmoid(_part(m, gates, 3, 4)), m.tanh(c)

    def vjp_gates(m, g, factors):
        o, t = factors
        return m.cat([m.zeros_like(g)] * 3 + [g * t * _slope(o)], len(g.shape) - 1)

    def vjp_c(m, g, factors):
        o, t = factors
        return g * o * (1.0 - t * t)


@op(policy=NOT_LISTED)
class gru_state:
    """n + sigmoid(xz + hz) * (h - n) with n = tanh(xn + sigmoid(xr + hr) * hn), of x and hidden (..., 3 * H): r, z, n."""

    def forward(m, x, hidden, h):
        _, z, n, _ = _gru(m, x, hidden)
        return n + z * (h - n)

    def shared_gates(m, g, x, hidden):
        return _gru(m, x, hidden)

    def shared_slopes(m, g, h, gates):
        r, z, n, hn = gates
        dn = g * (1.0 - z) * (1.0 - n * n)
        return [dn * hn * _slope(r), g * (h - n) * _slope(z), dn]

    def vjp_x(m, g, slopes):
        return m.cat(slopes, len(g.shape) - 1)

    def vjp_hidden(m, g, slopes, gates):
        dr, dz, dn = slopes
        return m.cat([dr, dz, dn * gates[0]], len(g.shape) - 1)

    def vjp_h(m, g, gates):
        return g * gates[1]


def _gru(m, x, hidden):
    """r, z, n, and hidden's part of n."""
    (xr, xz, xn), (hr, hz, hn) = _parts(m, x, 3), _parts(m, hidden, 3)
    r = m.sigmoid(xr + hr)
    return r, m.sigmoid(xz + hz), m.tanh(xn + r * hn), hn
