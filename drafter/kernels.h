/* What all kernels of the native engine share: matrices as an archive stores them, activations as products read them. The
 * products themselves are in one of two files, chosen when the compiler reads this one by what the machine has:
 * kernels_bf16.h (AVX512 with BF16 and VNNI: bf16 activations, 16 fp32 sums a register) or kernels_any.h (AVX2: 15-bit
 * activations beside NF4 and INT8; without it plain vectors of fp32).
 *
 * Legend: N tokens, R rows and K columns of a matrix; a block is 64 columns = 32 bytes of NF4 codes with one scale.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#define BF16_UNIT 1
#else
#define BF16_UNIT 0
#endif
#if !BF16_UNIT && defined(__AVX2__) && defined(__FMA__)
#define AVX2_UNIT 1
#else
#define AVX2_UNIT 0
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum { NF4 = 1, BF16 = 2, INT8 = 3 };

/* One matrix [rows, cols] as the archive stores it, nothing repacked: a mapped archive stays shared. */
typedef struct {
    int32_t kind, rows, cols, rank;
    const uint8_t *codes;    /* NF4: two a byte, the first element in the high nibble; INT8: one a byte; BF16: values */
    const uint16_t *scales;  /* bf16: NF4 [rows * cols / 64], INT8 [rows] */
    const float *bias;       /* [rows] or NULL */
    const uint16_t *lora_a;  /* bf16 [rank, padded cols] in the activations' order, or NULL (see order_row) */
    const uint16_t *lora_b;  /* bf16 [rows, rank] */
    float lora_scale;
} Matrix;

static const float LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f, -0.28444138169288635f,
    -0.18477343022823334f, -0.09105003625154495f, 0.0f, 0.07958029955625534f, 0.16093020141124725f,
    0.24611230194568634f, 0.33791524171829224f, 0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};

static inline float from_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

static inline uint16_t to_bf16(float value) { /* to nearest, ties to even; the engine never holds a NaN */
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline int padded(int cols) { return (cols + 127) / 128 * 128; }

/* The input of matrices: N rows of `padded(cols)`, zeros behind the last column. kernels_bf16.h keeps `half`, which may be
 * in the order of NF4 codes; kernels_any.h `full`, and with AVX2 `fixed` for matrices of whole numbers:
 * x = step * fixed, a step for 64 columns, in the order in which NF4 or INT8 codes are read. */
typedef struct {
    float *full;
    uint16_t *half;
    int16_t *fixed;
    float *step; /* [N, width / 64] */
    int width;   /* of a row */
} Input;

static void *zeros(size_t count, size_t size) { /* on a cache line; NULL when there is no memory */
    size_t bytes = (count * size + 63) / 64 * 64 + 64;
    void *out = aligned_alloc(64, bytes);
    if (out) memset(out, 0, bytes);
    return out;
}

static Input new_input(int tokens, int cols) {
    Input x = {.width = padded(cols)};
    const size_t count = (size_t)tokens * x.width;
#if BF16_UNIT
    x.half = zeros(count, sizeof(uint16_t));
#else
    x.full = zeros(count, sizeof(float));
#if AVX2_UNIT
    x.fixed = zeros(count, sizeof(int16_t)), x.step = zeros(count / 64, sizeof(float));
#endif
#endif
    return x;
}

static int is_whole(const Input *x) { /* whether there was memory */
#if AVX2_UNIT
    return x->full && x->fixed && x->step;
#else
    return x->full || x->half;
#endif
}

static void free_input(Input *x) { free(x->full), free(x->half), free(x->fixed), free(x->step); }

/* row n alone */
static inline Input input_of(const Input *x, int n) {
    Input one = *x;
    const size_t at = (size_t)n * x->width;
    if (one.half) one.half += at;
    if (one.full) one.full += at;
    if (one.fixed) one.fixed += at, one.step += at / 64;
    return one;
}

#if BF16_UNIT
#include "kernels_bf16.h"
#else
#include "kernels_any.h"
#endif
