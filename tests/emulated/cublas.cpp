// cuBLAS's two products as three loops. They refuse leading dimensions and pairs of types that cuBLAS refuses, and add up in the
// format that the call asks for, though not in cuBLAS's order.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <library_types.h>

#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

int submit(void* stream, std::function<void()> work);  // cuda.cpp

// cublas_api.h, which CuPy's wheel does not bring
enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { COMPUTE_16F = 64, COMPUTE_32F = 68, COMPUTE_64F = 70, COMPUTE_32F_FAST_TF32 = 77 };

typedef long long i64;
struct Matrix {
  const char* at;
  int type, ld;
  bool across;  // transposed: rows and columns change places
  i64 size() const { return type == CUDA_R_64F ? 8 : type == CUDA_R_32F ? 4 : 2; }
  void* address(i64 row, i64 col) const { return (void*)(at + size() * (across ? row * ld + col : col * ld + row)); }
  double get(i64 row, i64 col) const {
    void* p = address(row, col);
    return type == CUDA_R_64F   ? *(double*)p
           : type == CUDA_R_32F ? *(float*)p
           : type == CUDA_R_16F ? (float)*(__half*)p
                                : (float)*(__nv_bfloat16*)p;
  }
  void set(i64 row, i64 col, double x) const {
    void* p = address(row, col);
    if (type == CUDA_R_64F) *(double*)p = x;
    else if (type == CUDA_R_32F) *(float*)p = x;
    else if (type == CUDA_R_16F) *(__half*)p = (float)x;
    else *(__nv_bfloat16*)p = (float)x;
  }
};

static bool accepted(int a, int b, int c, int compute) {
  if (a != b) return false;
  if (compute == COMPUTE_64F) return a == CUDA_R_64F && c == a;
  if (compute == COMPUTE_16F) return a == CUDA_R_16F && c == a;
  if (compute == COMPUTE_32F_FAST_TF32) return a == CUDA_R_32F && c == a;
  return compute == COMPUTE_32F && a != CUDA_R_64F && (c == a || c == CUDA_R_32F);
}

// Sum: what is added up in. Columns of the result are independent, and the inner loop runs along one, so that it vectorizes.
template <class Sum>
static void product(int m, int n, int k, double alpha, Matrix a, Matrix b, double beta, Matrix c, bool round) {
  std::vector<Sum> left((size_t)m * k), sums(m);
  for (i64 l = 0; l < k; l++)
    for (i64 i = 0; i < m; i++) left[l * m + i] = a.get(i, l);
  for (i64 j = 0; j < n; j++) {
    std::fill(sums.begin(), sums.end(), Sum(0));
    for (i64 l = 0; l < k; l++) {
      Sum x = b.get(l, j);
      const Sum* column = &left[l * m];
      if (round)  // sums in half: every product and every sum is rounded
        for (i64 i = 0; i < m; i++) sums[i] = (float)__half((float)sums[i] + (float)__half((float)(x * column[i])));
      else
        for (i64 i = 0; i < m; i++) sums[i] += x * column[i];
    }
    for (i64 i = 0; i < m; i++) {
      Sum y = Sum(alpha) * sums[i];
      c.set(i, j, beta ? y + Sum(beta) * Sum(c.get(i, j)) : y);  // beta 0: what c holds is not read, NaN included
    }
  }
}

static void* current;

static double scalar(const void* at, int compute) {
  return compute == COMPUTE_64F ? *(double*)at : compute == COMPUTE_16F ? (float)*(__half*)at : *(float*)at;
}

extern "C" {
int cublasCreate_v2(void** handle) { *handle = new char; return SUCCESS; }
int cublasDestroy_v2(void* handle) { delete (char*)handle; return SUCCESS; }
int cublasGetVersion_v2(void*, int* version) { *version = 130000; return SUCCESS; }
int cublasSetStream_v2(void*, void* stream) { current = stream; return SUCCESS; }
int cublasSetMathMode(void*, int) { return SUCCESS; }
int cublasGetMathMode(void*, int* mode) { *mode = 0; return SUCCESS; }
int cublasSetPointerMode_v2(void*, int) { return SUCCESS; }  // to the host's, always
int cublasGetPointerMode_v2(void*, int* mode) { *mode = 0; return SUCCESS; }

int cublasGemmEx(void*, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at, int lda, const void* b,
                 int bt, int ldb, const void* beta, void* c, int ct, int ldc, int compute, int) {
  if (lda < (ta ? k : m) || ldb < (tb ? n : k) || ldc < m || lda < 1 || ldb < 1 || ldc < 1) return INVALID_VALUE;
  if (!accepted(at, bt, ct, compute)) return NOT_SUPPORTED;
  double by = scalar(alpha, compute), kept = scalar(beta, compute);  // read at the call, as from the host
  Matrix left{(const char*)a, at, lda, ta != 0}, right{(const char*)b, bt, ldb, tb != 0}, out{(const char*)c, ct, ldc, false};
  return submit(current, [=] {
    if ((double)m * n * k > 2e10)  // half a minute here: nobody may use the numbers
      for (i64 j = 0; j < n; j++)
        for (i64 i = 0; i < m; i++) out.set(i, j, std::numeric_limits<double>::quiet_NaN());
    else if (compute == COMPUTE_64F) product<double>(m, n, k, by, left, right, kept, out, false);
    else product<float>(m, n, k, by, left, right, kept, out, compute == COMPUTE_16F);
  });
}

int cublasGemmStridedBatchedEx(void* handle, int ta, int tb, int m, int n, int k, const void* alpha, const void* a, int at,
                               int lda, i64 sa, const void* b, int bt, int ldb, i64 sb, const void* beta, void* c, int ct,
                               int ldc, i64 sc, int batch, int compute, int algorithm) {
  auto moved = [](const void* p, int type, i64 elements) { return (char*)p + elements * Matrix{nullptr, type}.size(); };
  int status = SUCCESS;
  for (i64 i = 0; i < batch && !status; i++)
    status = cublasGemmEx(handle, ta, tb, m, n, k, alpha, moved(a, at, i * sa), at, lda, moved(b, bt, i * sb), bt, ldb, beta,
                          moved(c, ct, i * sc), ct, ldc, compute, algorithm);
  return status;
}
}
