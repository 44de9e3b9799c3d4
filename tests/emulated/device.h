// What a kernel's text finds on a GPU, on a CPU: threads of a block run one after the other. Where a text has barriers or
// shuffles, each thread has a stack of its own, and waiting hands over to the next one.
#pragma once
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <setjmp.h>
#include <ucontext.h>
#include <vector_types.h>
#include <cuda_fp16.h>
#include <cuda_bf16.h>

// CUDA's headers, included above, have their own definitions for a compiler of the host.
#undef __device__
#undef __host__
#undef __forceinline__
#undef __noinline__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __grid_constant__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__
#define __shared__ static  // blocks run one after the other
#define __constant__ static
#define __launch_bounds__(...)
#define __grid_constant__
#undef __global__
#ifdef FIND_KERNELS
#define __global__ A_KERNEL  // compiler.py looks for this word in the preprocessed text
#else
#define __global__
#endif
#define __CUDACC_VER_MAJOR__ 13  // CuPy's headers ask for it

// CUDA's functions are global ones.
using std::abs, std::acos, std::asin, std::atan, std::atan2, std::ceil, std::copysign, std::cos, std::cosh, std::erf, std::exp;
using std::expm1, std::fabs, std::floor, std::fmax, std::fmin, std::sinh, std::tan;
using std::fmod, std::isfinite, std::isinf, std::isnan, std::log, std::log10, std::log1p, std::log2, std::max, std::min;
using std::pow, std::rint, std::signbit, std::sin, std::sqrt, std::tanh, std::trunc;
static inline long long min(long long a, long b) { return a < b ? a : b; }
static int __popc(unsigned x) { return __builtin_popcount(x); }
static int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static int __clz(int x) { return x ? __builtin_clz(x) : 32; }
static float rsqrtf(float x) { return 1 / sqrtf(x); }

struct Dim { unsigned x, y, z; };
static Dim gridDim, blockDim, blockIdx, threadIdx;
static const int warpSize = 32;

namespace emulated {
// A thread starts by setcontext, on its stack; then _setjmp and _longjmp switch, which make no system call.
struct Thread {
  ucontext_t start;
  jmp_buf here;  // where it waits
  bool started, alive;
};
static jmp_buf scheduler;
static std::vector<Thread> threads;
static std::vector<char> stacks;
static unsigned current, living, arrived, barriers;  // barriers: how many the block has passed
static std::function<void()>* body;
static const size_t STACK = 65536;

static void pass_if_all_arrived() {
  if (arrived == living) {
    arrived = 0;
    barriers++;
  }
}

static void thread() {
  (*body)();
  threads[current].alive = false;
  living--;
  if (living) pass_if_all_arrived();
  _longjmp(scheduler, 1);
}

// The other threads run until they wait, or end, before this one goes on.
static void yield() {
  if (!_setjmp(threads[current].here)) _longjmp(scheduler, 1);
}

static void go_on(unsigned t) {
  if (_setjmp(scheduler)) return;  // back from the thread
  current = t;
  threadIdx = {t, 0, 0};
  if (threads[t].started) _longjmp(threads[t].here, 1);
  threads[t].started = true;
  setcontext(&threads[t].start);
}

// All threads of a block, in turns, until none is left.
static void block_with_barriers(unsigned n, std::function<void()>& f) {
  threads.resize(n);
  stacks.resize(n * STACK);
  living = n;
  arrived = 0;
  body = &f;
  for (unsigned t = 0; t < n; t++) {
    threads[t].alive = true;
    threads[t].started = false;
    getcontext(&threads[t].start);
    threads[t].start.uc_stack.ss_sp = &stacks[t * STACK];
    threads[t].start.uc_stack.ss_size = STACK;
    makecontext(&threads[t].start, thread, 0);
  }
  while (living)
    for (unsigned t = 0; t < n; t++)
      if (threads[t].alive) go_on(t);
}

// One launch with its arguments, copied as bytes: their destructors and constructors are not a launch's business.
template <class A> struct Held { alignas(16) char bytes[sizeof(A)]; };
template <bool waits, class... A, size_t... I>
static std::function<void()> bound(void (*kernel)(A...), const unsigned* dims, void** args, std::index_sequence<I...>) {
  auto held = std::make_shared<std::tuple<Held<A>...>>();
  (memcpy(&std::get<I>(*held), args[I], sizeof(A)), ...);
  unsigned grid = dims[0], block = dims[1];
  return [=] {
    std::function<void()> f = [&] { kernel(*(A*)&std::get<I>(*held)...); };
    gridDim = {grid, 1, 1};
    blockDim = {block, 1, 1};
    for (unsigned b = 0; b < grid; b++) {
      blockIdx = {b, 0, 0};
      if (waits) block_with_barriers(block, f);
      else
        for (unsigned t = 0; t < block; t++) {
          threadIdx = {t, 0, 0};
          f();
        }
    }
  };
}
template <bool waits, class... A>
static std::function<void()> bind(void (*kernel)(A...), const unsigned* dims, void** args) {
  return bound<waits>(kernel, dims, args, std::index_sequence_for<A...>());
}

// A shuffle: all write, all read. Every thread of the warp comes by, so one turn each is enough.
static char slots[1024][8];
template <class T> static T from_thread(T x, unsigned other) {
  memcpy(slots[threadIdx.x], &x, sizeof x);
  yield();
  T y;
  memcpy(&y, slots[other], sizeof y);
  yield();
  return y;
}
}  // namespace emulated

static void __syncthreads() {
  unsigned passed = emulated::barriers;
  emulated::arrived++;
  emulated::pass_if_all_arrived();
  while (emulated::barriers == passed) emulated::yield();
}
static void __syncwarp(unsigned = 0) { emulated::yield(); }
static void __threadfence() {}
template <class T> static T __shfl_xor_sync(unsigned, T x, int mask, int = 32) {
  return emulated::from_thread(x, threadIdx.x ^ mask);
}
template <class T> static T __shfl_sync(unsigned, T x, int lane, int width = 32) {
  return emulated::from_thread(x, threadIdx.x / width * width + lane % width);
}
template <class T> static T __shfl_up_sync(unsigned, T x, unsigned d, int width = 32) {
  return emulated::from_thread(x, threadIdx.x % width >= d ? threadIdx.x - d : threadIdx.x);
}
template <class T> static T __shfl_down_sync(unsigned, T x, unsigned d, int width = 32) {
  return emulated::from_thread(x, threadIdx.x % width + d < width ? threadIdx.x + d : threadIdx.x);
}

// Atomic, for nothing comes between.
template <class T, class U> static T atomicAdd(T* p, U x) { T old = *p; *p = (T)(old + x); return old; }
template <class T, class U> static T atomicMax(T* p, U x) { T old = *p; if (x > old) *p = x; return old; }
template <class T, class U> static T atomicMin(T* p, U x) { T old = *p; if (x < old) *p = x; return old; }
template <class T> static T atomicCAS(T* p, T expected, T x) { T old = *p; if (old == expected) *p = x; return old; }
template <class T> static T atomicExch(T* p, T x) { T old = *p; *p = x; return old; }

template <class To, class From> static To same_bits(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  memcpy(&to, &from, sizeof to);
  return to;
}
static float __int_as_float(int i) { return same_bits<float>(i); }
static int __float_as_int(float x) { return same_bits<int>(x); }
static unsigned __float_as_uint(float x) { return same_bits<unsigned>(x); }
static double __longlong_as_double(long long i) { return same_bits<double>(i); }
static long long __double_as_longlong(double x) { return same_bits<long long>(x); }
