/* Read bandwidth by C and OpenMP: dot products, and sums of 1, 2, 4 and 8 streams, unrolled. One JSON line.

   cc -O3 -march=native -ffast-math -fopenmp bandwidth.c -o bandwidth
   ./bandwidth BYTES THREADS ROUNDS

   In each round every kernel has its turn; of each the best round counts. A thread reads memory that it was
   the first to touch. `lanes` is a vector that GCC and clang cut to what the machine has. */
#include <omp.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

typedef float lanes __attribute__((vector_size(64), aligned(64), may_alias));
enum { LANES = 16, AHEAD = 8 }; /* accumulators: enough to hide the latency of an addition */

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + t.tv_nsec * 1e-9;
}

static float total(const lanes *s, int count) {
  float all = 0;
  for (int j = 0; j < count; j++)
    for (int l = 0; l < LANES; l++) all += s[j][l];
  return all;
}

/* n: floats, a multiple of 8 * AHEAD * LANES. STREAMS streams, each read AHEAD / STREAMS vectors at a time. */
#define SUM(STREAMS)                                                                          \
  static float sum##STREAMS(const float *a, long n) {                                         \
    enum { STEP = AHEAD / STREAMS };                                                          \
    lanes s[AHEAD] = {{0}};                                                                   \
    const long m = n / STREAMS / LANES;                                                       \
    const lanes *v = (const lanes *)a;                                                        \
    for (long i = 0; i < m; i += STEP) {                                                      \
      _Pragma("GCC unroll 8") for (int j = 0; j < STREAMS; j++)                               \
          _Pragma("GCC unroll 8") for (int k = 0; k < STEP; k++) s[j * STEP + k] += v[j * m + i + k]; \
    }                                                                                         \
    return total(s, AHEAD);                                                                   \
  }
SUM(1)
SUM(2)
SUM(4)
SUM(8)

static float dot(const float *a, const float *b, long n) {
  lanes s[4] = {{0}};
  const lanes *v = (const lanes *)a, *w = (const lanes *)b;
  for (long i = 0; i < n / LANES; i += 4) {
    _Pragma("GCC unroll 4") for (int k = 0; k < 4; k++) s[k] += v[i + k] * w[i + k];
  }
  return total(s, 4);
}

static float simple_sum(const float *a, long n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (long i = 0; i < n; i++) s += a[i];
  return s;
}

static float simple_dot(const float *a, const float *b, long n) {
  float s = 0;
#pragma omp simd reduction(+ : s)
  for (long i = 0; i < n; i++) s += a[i] * b[i];
  return s;
}

static const char *NAMES[] = {"dot, 1 stream",  "dot, 2 streams", "sum, 1 stream",
                              "sum, 2 streams", "sum, 4 streams", "sum, 8 streams",
                              "simple sum",     "simple dot"};
enum { KERNELS = sizeof NAMES / sizeof *NAMES };

static float run(int kernel, const float *a, long n) {
  switch (kernel) {
    case 0: return dot(a, a, n);
    case 1: return dot(a, a + n / 2, n / 2);
    case 2: return sum1(a, n);
    case 3: return sum2(a, n);
    case 4: return sum4(a, n);
    case 5: return sum8(a, n);
    case 6: return simple_sum(a, n);
    default: return simple_dot(a, a + n / 2, n / 2);
  }
}

int main(int count, char **arguments) {
  if (count != 4) return fprintf(stderr, "usage: bandwidth BYTES THREADS ROUNDS\n"), 2;
  const int threads = atoi(arguments[2]), rounds = atoi(arguments[3]);
  const long n = atol(arguments[1]) / (long)sizeof(float) / threads / 4096 * 4096;
  float **part = calloc(threads, sizeof *part);
  double best[KERNELS] = {0};
  volatile float sink = 0;
  int failed = 0;
  omp_set_num_threads(threads);
#pragma omp parallel
  {
    float *mine = mmap(0, n * sizeof(float), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mine == MAP_FAILED) {
#pragma omp atomic write
      failed = 1;
    } else {
#ifdef MADV_HUGEPAGE
      madvise(mine, n * sizeof(float), MADV_HUGEPAGE); /* as NumPy does */
#endif
      for (long i = 0; i < n; i++) mine[i] = 1;
      part[omp_get_thread_num()] = mine;
    }
  }
  if (failed) return fprintf(stderr, "no room for %s bytes\n", arguments[1]), 1;
  for (int round = 0; round < rounds; round++)
    for (int kernel = 0; kernel < KERNELS; kernel++) {
      const double start = now();
#pragma omp parallel
      { sink = run(kernel, part[omp_get_thread_num()], n); }
      const double rate = (double)n * sizeof(float) * threads / (now() - start);
      if (rate > best[kernel]) best[kernel] = rate;
    }
  for (int kernel = 0; kernel < KERNELS; kernel++)
    printf("%s\"%s\": %.0f", kernel ? ", " : "{", NAMES[kernel], best[kernel]);
  puts("}");
  (void)sink;
  return 0;
}
