// The functions of CUDA's runtime and driver that CuPy calls, done by the CPU. Device memory is ordinary memory, and work is
// finished before the call that starts it returns. Names and signatures are CUDA's own: its headers check them. Only what the
// tests need is here; redirect.py makes the rest of the runtime fail by name.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

typedef std::function<void()> Work;
typedef std::vector<Work> Graph;
struct Stream { bool blocking; };  // blocking: ordered with the default stream

static const int MAJOR = 9, MINOR = 0;  // a compute capability that has everything minamp asks for
static const size_t MEMORY = (size_t)6 << 30;
static size_t used;
static Stream* capturing;  // one capture at a time
static bool broken;
static Graph recorded;

// ---------------------------------------------------------------------------------------------------- streams and captures

// Do `work` now, or write it down if `stream` is being captured. Also called by cublas.cpp.
int submit(void* stream, Work work) {
  if (capturing && !stream && capturing->blocking) {
    broken = true;
    return cudaErrorStreamCaptureImplicit;
  }
  if (capturing && stream == capturing) recorded.push_back(work);
  else work();
  return cudaSuccess;
}

// What may not happen in a capture (of this stream) breaks it, and its end says so.
static cudaError_t forbidden_in_capture(bool here = true) {
  if (!capturing || !here) return cudaSuccess;
  broken = true;
  return cudaErrorStreamCaptureUnsupported;
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
  *stream = (cudaStream_t) new Stream{!(flags & cudaStreamNonBlocking)};
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) { delete (Stream*)stream; return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { return forbidden_in_capture((Stream*)stream == capturing); }
cudaError_t cudaDeviceSynchronize() { return forbidden_in_capture(); }

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  if (!stream || capturing) return cudaErrorStreamCaptureUnsupported;
  capturing = (Stream*)stream;
  broken = false;
  recorded.clear();
  return cudaSuccess;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  if (capturing && !stream) return cudaErrorStreamCaptureImplicit;
  bool here = capturing && (Stream*)stream == capturing;
  *status = !here    ? cudaStreamCaptureStatusNone
            : broken ? cudaStreamCaptureStatusInvalidated
                     : cudaStreamCaptureStatusActive;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  capturing = nullptr;
  *graph = broken ? nullptr : (cudaGraph_t) new Graph(recorded);
  return broken ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* ready, cudaGraph_t graph, unsigned long long) {
  *ready = (cudaGraphExec_t) new Graph(*(Graph*)graph);
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t ready, cudaStream_t stream) {
  return (cudaError_t)submit(stream, [ready] {
    for (Work& work : *(Graph*)ready) work();
  });
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { delete (Graph*)graph; return cudaSuccess; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t ready) { delete (Graph*)ready; return cudaSuccess; }

// Events: everything before them is done. Between any two lies a millisecond, so that nobody takes it for a measurement.
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { *event = (cudaEvent_t) new char; return cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t event) { delete (char*)event; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventQuery(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return forbidden_in_capture(); }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { *ms = 1; return cudaSuccess; }

// -------------------------------------------------------------------------------------------------------------------- memory

static const size_t ALIGNED = 512;  // as cudaMalloc's addresses; the size is kept in as many bytes before them

cudaError_t cudaMalloc(void** result, size_t n) {
  void* block;
  if (n > MEMORY - used || posix_memalign(&block, ALIGNED, n + ALIGNED)) return cudaErrorMemoryAllocation;
  *(size_t*)block = n;
  used += n;
  *result = (char*)block + ALIGNED;
  memset(*result, 0xFF, n);  // NaN in every format: who reads what nobody wrote shall see it
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  if (!address) return cudaSuccess;
  size_t* block = (size_t*)((char*)address - ALIGNED);
  used -= *block;
  free(block);
  return cudaSuccess;
}
cudaError_t cudaMemGetInfo(size_t* left, size_t* total) {
  *left = MEMORY - used;
  *total = MEMORY;
  return cudaSuccess;
}
cudaError_t cudaHostAlloc(void** result, size_t n, unsigned) {
  return posix_memalign(result, ALIGNED, n) ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) { free(address); return cudaSuccess; }
// A copy from or to the host is refused in a capture: on replay the host's memory would hold something else.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t stream) {
  bool host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToHost;
  if (cudaError_t error = forbidden_in_capture(host && (Stream*)stream == capturing)) return error;
  return (cudaError_t)submit(stream, [=] { memcpy(to, from, n); });
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t n, cudaStream_t stream) {
  return (cudaError_t)submit(stream, [=] { memset(to, value, n); });
}
// CuPy asks whether the memory of a host's array is pinned: none is.
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* answer, const void*) { *answer = {}; return cudaSuccess; }

// ------------------------------------------------------------------------------------------------------------------ the card

cudaError_t cudaDriverGetVersion(int* version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* n) { *n = 1; return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidDevice; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* all, int) {
  memset(all, 0, sizeof *all);
  all->warpSize = 32;  // what CuPy's prefix sums ask for
  strcpy(all->name, "emulated");
  all->major = MAJOR;
  all->minor = MINOR;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = MAJOR; break;
    case cudaDevAttrComputeCapabilityMinor: *value = MINOR; break;
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 2147483647; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 49152; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    default: *value = 0;
  }
  return cudaSuccess;
}

// ----------------------------------------------------------------------------------------------------------- driver: kernels

// What compiler.py puts at a compiled text's end: one launch as work, or false if the text has no such kernel.
typedef bool (*Bind)(const char* name, const unsigned* dims, void** args, Work* work);
struct Function { std::string name; Bind bind; };

extern "C" {
CUresult cuGetErrorName(CUresult, const char** text) { *text = "CUDA_ERROR"; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { *text = "refused by the emulated GPU"; return CUDA_SUCCESS; }
// The image is the path of the shared library that compiler.py made.
CUresult cuModuleLoadData(CUmodule* module, const void* image) {
  *module = (CUmodule)dlopen((const char*)image, RTLD_NOW | RTLD_LOCAL);
  if (!*module) fprintf(stderr, "%s\n", dlerror());
  return *module ? CUDA_SUCCESS : CUDA_ERROR_INVALID_IMAGE;
}
CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }  // captured launches may still need it
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  Bind bind = (Bind)dlsym(module, "bind_kernel");
  if (!bind(name, nullptr, nullptr, nullptr)) return CUDA_ERROR_NOT_FOUND;
  *function = (CUfunction) new Function{name, bind};
  return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned shared, CUstream stream, void** args, void**) {
  Function* f = (Function*)function;
  // The limits of every card since 3.0; and the one dimension that device.h runs, all that CuPy and minamp use.
  if (!gx || gx > 2147483647u || !bx || bx > 1024 || shared > 49152 || gy * gz * by * bz != 1) {
    fprintf(stderr, "%s: no launch of (%u, %u, %u) blocks of (%u, %u, %u) threads with %u bytes\n", f->name.c_str(), gx, gy,
            gz, bx, by, bz, shared);
    return CUDA_ERROR_INVALID_VALUE;
  }
  unsigned dims[] = {gx, bx};
  Work work;
  f->bind(f->name.c_str(), dims, args, &work);  // the arguments are copied here, as a launch does
  return (CUresult)submit(stream, work);
}
}
