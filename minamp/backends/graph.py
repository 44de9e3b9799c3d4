"""CUDA graphs: the launches of a step recorded once, then started again all together."""

from minamp.backends import device
from minamp.backends.device import gpu_status, xp


class CUDAGraph:
    """Launches captured from a stream, as torch.cuda.CUDAGraph. RuntimeError where there is no GPU.

    A replay runs the same kernels on the same memory: it reads new data only if they were copied into the captured tensors
    (x.copy_(...)), and Python numbers such as a learning rate or dropout's key stay what they were.
    """

    def __init__(self):
        status = gpu_status()
        if status != "ok":
            raise RuntimeError(f"CUDAGraph: there is no GPU whose work could be captured: {status}")
        self._graph = self._stream = None
        # Replays use the addresses of the capture, so what was allocated then comes from a pool that nobody else uses.
        self._pool = xp.cuda.MemoryPool()
        self._tables = []

    def capture_begin(self, stream=None):
        """Record what is launched from here on, on a stream of its own (or `stream`), instead of running it."""
        if self._stream is not None:
            raise RuntimeError("CUDAGraph: a capture has begun already: call capture_end() first")
        self._stream = xp.cuda.Stream(non_blocking=True) if stream is None else stream
        self._inside = (xp.cuda.using_allocator(self._pool.malloc), self._stream)
        for context in self._inside:
            context.__enter__()
        self._stream.begin_capture()

    def capture_end(self):
        """Stop recording. RuntimeError if something in between can't be captured, such as a copy to the host."""
        if self._stream is None:
            raise RuntimeError("CUDAGraph: no capture has begun: call capture_begin() first")
        try:
            self._graph = self._stream.end_capture()
            self._tables = device.tables()  # replays read them, whatever becomes of the cache
        finally:
            for context in reversed(self._inside):
                context.__exit__(None, None, None)
            self._stream = None

    def replay(self):
        """Start the captured launches on the current stream; does not wait for them."""
        if self._graph is None:
            raise RuntimeError(
                "CUDAGraph: nothing was captured: use `with minamp.cuda.graph(g):` around a step first"
            )
        self._graph.launch()


class graph:
    """`with graph(g):` captures the block's launches into the CUDAGraph `g` without running them, as torch.cuda.graph.

    Run the block a few times before: kernels are compiled and small tables moved to the GPU at first use, and neither can be
    captured. Everything must stay on the GPU: optimizers with capturable=True, no .item(), no print of a loss. Start from
    optimizer.zero_grad(), so that the gradients are the capture's own.
    """

    def __init__(self, cuda_graph, *, stream=None):
        self._graph, self._its_stream = cuda_graph, stream

    def __enter__(self):
        xp.cuda.Device().synchronize()  # what still runs must not be overtaken by a replay
        self._graph.capture_begin(self._its_stream)

    def __exit__(self, kind, *_):
        try:
            self._graph.capture_end()
        except Exception:
            if kind is None:  # else the block's own error says why
                raise
