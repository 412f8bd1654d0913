/* Products for processors without the bf16 unit, in vectors of the compiler's own (AVX2, NEON, SSE). Dense rows are fp32
 * sums of widened bf16. NF4 and INT8: with AVX2 whole numbers, because its byte look-ups and 16-bit products do 64
 * columns of a token in about 10 instructions where fp32 takes 16, the decoding apart; else decoded to fp32 first.
 *
 * Legend: N tokens, R rows and K columns of a matrix; M tokens of a pass; a block is 64 columns.
 */

typedef float Value;

#if AVX2_UNIT
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef int32_t VecInt __attribute__((vector_size(4 * LANES)));
typedef float LooseVec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t LooseHalf __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

static inline Vec load(const float *from) { return *(const LooseVec *)from; }
static inline void store(float *to, Vec v) { *(LooseVec *)to = v; }
static inline Vec widen(const uint16_t *from) { return (Vec)(__builtin_convertvector(*(const LooseHalf *)from, VecInt) << 16); }

/* a * b + c, in one rounding wherever it stands: left to itself the compiler fuses some and not others, and a sum would
 * depend on how many tokens share a call */
static inline Vec fused(Vec a, Vec b, Vec c) {
#if AVX2_UNIT
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

static inline Vec keep(Vec v) { /* in a register: a compiler that reads memory again for each product makes loads the limit */
#if AVX2_UNIT
    __asm__("" : "+x"(v));
#endif
    return v;
}

/* sums of four registers, each over its lanes */
static inline void sum4(const Vec *v, float *out) {
#if AVX2_UNIT
    __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    for (int i = 0; i < 4; i++) out[i] = (v[i][0] + v[i][1]) + (v[i][2] + v[i][3]);
#endif
}

static inline Vec choose_by(VecInt mask, Vec yes, Vec no) { return (Vec)(((VecInt)yes & mask) | ((VecInt)no & ~mask)); }
static inline int any_of(VecInt mask) {
#if AVX2_UNIT
    return _mm256_movemask_ps((__m256)mask);
#else
    return mask[0] | mask[1] | mask[2] | mask[3];
#endif
}
static inline Vec all_of(float value) { return (Vec){} + value; }

/* e^x for x <= 0: 2^n * p(f), f in [-ln 2 / 2, ln 2 / 2]; p is the Taylor sum to f^6, good to 1e-7 */
static inline Vec exp_of(Vec x) {
    x = choose_by(x > -87.0f, x, all_of(-87.0f));
    const Vec shift = all_of(12582912.0f); /* 1.5 * 2^23: what is added to it is rounded to a whole number */
    const Vec n = (x * 1.44269504f + shift) - shift;
    Vec f = x - n * 0.693145752f;
    f = f - n * 1.42860677e-6f;
    Vec p = f * (1.0f / 720) + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    return (Vec)((VecInt)p + (__builtin_convertvector(n, VecInt) << 23));
}

/* ---------------------------------------------------------------------------- activations */

#if AVX2_UNIT
/* 15 bits and a sign: 8 products of two such numbers, what a lane sums over a block, stay below 2^31 */
#define LARGEST 16383

/* Where column k of a block stands in the order of NF4 codes. A block's 32 bytes are split in two registers of nibbles, the
 * high ones (even columns) and the low ones, and each, looked up, in two of 16-bit numbers: bytes 0..7 and 16..23, then
 * the others, as unpacking leaves them. */
static inline int place_of(int k) {
    const int byte = k / 2;
    return 32 * (k & 1) + 16 * (byte / 8 & 1) + 8 * (byte / 16) + byte % 8;
}

static void store_block(Input *x, int n, int k, int kind) { /* columns k .. k + 63 of a row as whole numbers */
    const float *from = x->full + (size_t)n * x->width + k;
    int16_t *to = x->fixed + (size_t)n * x->width + k;
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 most = _mm256_setzero_ps();
    for (int i = 0; i < 64; i += 8) most = _mm256_max_ps(most, _mm256_andnot_ps(sign, _mm256_loadu_ps(from + i)));
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(most), _mm256_extractf128_ps(most, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    const float largest = fmaxf(fmaxf(_mm_cvtss_f32(half), _mm_cvtss_f32(_mm_movehdup_ps(half))), 1e-30f);
    const __m256 factor = _mm256_set1_ps(LARGEST / largest);
    int32_t whole[64];
    for (int i = 0; i < 64; i += 8)
        _mm256_storeu_si256((void *)(whole + i), _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + i), factor)));
    if (kind == NF4)
        for (int i = 0; i < 64; i++) to[place_of(i)] = (int16_t)whole[i];
    else
        for (int i = 0; i < 64; i++) to[i] = (int16_t)whole[i];
    x->step[((size_t)n * x->width + k) / 64] = largest / LARGEST;
}
#endif

static void store_input(Input *x, int n, const float *from, int cols, int kind) {
    float *row = x->full + (size_t)n * x->width;
    memcpy(row, from, sizeof(float) * (size_t)cols);
    memset(row + cols, 0, sizeof(float) * (size_t)(padded(cols) - cols));
    (void)kind;
#if AVX2_UNIT
    for (int k = 0; k < cols && kind != BF16; k += 64) store_block(x, n, k, kind);
#endif
}

/* A row of the adapter's A, bf16 [cols] -> [padded(cols)]; it is multiplied with `full` */
static void order_row(const uint16_t *from, uint16_t *to, int cols, int kind) {
    (void)kind;
    memset(to, 0, sizeof(uint16_t) * (size_t)padded(cols));
    memcpy(to, from, sizeof(uint16_t) * (size_t)cols);
}

/* ---------------------------------------------------------------------------- fp32 sums */

enum { PANEL = 3, TILE_ROWS = 16, TILE_COLS = 1024, TILE_NEXT = TILE_COLS + 16 }; /* not 4 KB: rows would share lines */

/* y[m, i] (+)= row i . x[m] for M tokens and R rows of bf16 (`half`) or fp32: 3 x 4 sums, 3 registers of x and 1 of
 * weights are the 16 that AVX2 has, and 12 products take longer than the 7 loads beside them. */
static inline __attribute__((always_inline)) void tile(const void *w, size_t ldw, const int half, const int R, int cols,
                                                       const float *x, size_t ldx, const int M, float *y, size_t ldy, int add) {
    Vec sum[PANEL][4];
    for (int m = 0; m < M; m++)
        for (int i = 0; i < 4; i++) sum[m][i] = (Vec){};
    int k = 0;
    for (; k + LANES <= cols; k += LANES) {
        Vec in[PANEL];
        for (int m = 0; m < M; m++) in[m] = keep(load(x + m * ldx + k));
        for (int i = 0; i < R; i++) {
            const Vec row = keep(half ? widen((const uint16_t *)w + i * ldw + k) : load((const float *)w + i * ldw + k));
            for (int m = 0; m < M; m++) sum[m][i] = fused(row, in[m], sum[m][i]);
        }
    }
    for (int i = 0; k < cols && i < R; i++) { /* x is 0 behind its end, and a row ends where it does */
        float rest[LANES] = {0};
        for (int at = k; at < cols; at++)
            rest[at - k] = half ? from_bf16(((const uint16_t *)w)[i * ldw + at]) : ((const float *)w)[i * ldw + at];
        for (int m = 0; m < M; m++) sum[m][i] = fused(load(rest), load(x + m * ldx + k), sum[m][i]);
    }
    for (int m = 0; m < M; m++) {
        float total[4];
        sum4(sum[m], total);
        for (int i = 0; i < R; i++) y[m * ldy + i] = add ? y[m * ldy + i] + total[i] : total[i];
    }
}

/* y[n, r] (+)= rows [0, rows) . x[n] for all tokens */
static inline __attribute__((always_inline)) void panels(const void *w, size_t ldw, const int half, int rows, int cols,
                                                         const float *x, size_t ldx, int tokens, float *y, size_t ldy, int add) {
    for (int n = 0; n < tokens; n += PANEL, x += PANEL * ldx, y += PANEL * ldy) {
        const char *at = w;
        const size_t next = ldw * (half ? sizeof(uint16_t) : sizeof(float));
        int r = 0;
#define TILES(M)                                                                                             \
    for (; r + 4 <= rows; r += 4) tile(at + r * next, ldw, half, 4, cols, x, ldx, M, y + r, ldy, add);       \
    for (; r < rows; r++) tile(at + r * next, ldw, half, 1, cols, x, ldx, M, y + r, ldy, add);
        if (tokens - n >= 3) { TILES(3) }
        else if (tokens - n == 2) { TILES(2) }
        else { TILES(1) }
#undef TILES
    }
}

/* columns [k, k + count) of one row of codes as fp32 */
static inline void decode(int kind, const uint8_t *codes, const uint16_t *scales, int k, int count, float *out) {
    if (kind == BF16)
        for (int i = 0; i < count; i++) out[i] = from_bf16(((const uint16_t *)codes)[k + i]);
    else if (kind == INT8)
        for (int i = 0; i < count; i++) out[i] = (float)(int8_t)codes[k + i] * from_bf16(*scales);
    else
        for (int i = 0; i < count; i++) {
            const int code = codes[(k + i) / 2] >> (i & 1 ? 0 : 4) & 15;
            out[i] = LEVELS[code] * from_bf16(scales[(k + i) / 64]);
        }
}

/* y[n, r] = rows [0, rows) . x[n]: 16 rows x 1,024 columns at a time are decoded for all tokens (64 KB). Columns are summed
 * up in pieces of 1,024 however many tokens there are. `codes_row`, `scales_row`: distances of rows, in elements. */
static void decoded_rows(int kind, const uint8_t *codes, size_t codes_row, const uint16_t *scales, size_t scales_row, int rows,
                         int cols, const Input *x, int tokens, float *y, int ldy) {
    float block[TILE_ROWS * TILE_NEXT];
    for (int r = 0; r < rows; r += TILE_ROWS)
        for (int k = 0; k < cols; k += TILE_COLS) {
            const int R = rows - r < TILE_ROWS ? rows - r : TILE_ROWS, C = cols - k < TILE_COLS ? cols - k : TILE_COLS;
            for (int i = 0; i < R; i++)
                decode(kind, codes + (r + i) * codes_row, scales + (r + i) * scales_row, k, C, block + i * TILE_NEXT);
            panels(block, TILE_NEXT, 0, R, C, x->full + k, (size_t)x->width, tokens, y + r, (size_t)ldy, k > 0);
        }
}

/* rows [r0, r1) of bf16, the first at w; y points at token 0, row r0 */
static void dense_rows(const uint16_t *w, size_t ldw, int cols, const Input *x, int tokens, int r0, int r1, float *y, int ldy) {
    const int rows = r1 - r0;
    if (tokens > PANEL) {
        decoded_rows(BF16, (const uint8_t *)w, ldw * sizeof(uint16_t), NULL, 0, rows, cols, x, tokens, y, ldy);
        return;
    }
    for (int r = 0; r < rows; r += TILE_ROWS) /* widened on the way; the same pieces, so the same sums */
        for (int k = 0; k < cols; k += TILE_COLS) {
            const int R = rows - r < TILE_ROWS ? rows - r : TILE_ROWS, C = cols - k < TILE_COLS ? cols - k : TILE_COLS;
            panels(w + r * ldw + k, ldw, 1, R, C, x->full + k, (size_t)x->width, tokens, y + r, (size_t)ldy, k > 0);
        }
}

/* ---------------------------------------------------------------------------- whole numbers */
#if AVX2_UNIT

/* y[m] = row . x[m] for M tokens; one row's codes, looked up (NF4) or widened (INT8), serve them all. A block's products are
 * whole numbers, so only the sum over blocks is rounded, in the order of the columns. */
static inline __attribute__((always_inline)) void whole_tile(const int kind, const uint8_t *codes, const uint16_t *scales,
                                                             int cols, const Input *x, int first, const int M, float *y,
                                                             size_t ldy) {
    __m128i low_bytes, high_bytes;
    if (kind == NF4) {
        uint8_t low[16], high[16];
        for (int i = 0; i < 16; i++) {
            const int level = (int)rintf(LEVELS[i] * LARGEST);
            low[i] = (uint8_t)level, high[i] = (uint8_t)(level >> 8);
        }
        low_bytes = _mm_loadu_si128((const void *)low), high_bytes = _mm_loadu_si128((const void *)high);
    }
    const __m256i low = _mm256_broadcastsi128_si256(low_bytes), high = _mm256_broadcastsi128_si256(high_bytes);
    const __m256i nibble = _mm256_set1_epi8(15);
    const int16_t *in = x->fixed + (size_t)first * x->width;
    const float *step = x->step + (size_t)first * x->width / 64;
    __m256 sum[8];
    for (int m = 0; m < M; m++) sum[m] = _mm256_setzero_ps();
    for (int k = 0; k < cols; k += 64, codes += kind == NF4 ? 32 : 64) {
        __m256i a, b, c, d;
        float scale = 1;
        _mm_prefetch((const char *)codes + 2048, _MM_HINT_T0);
        if (kind == NF4) {
            const __m256i v = _mm256_loadu_si256((const void *)codes);
            const __m256i even = _mm256_and_si256(_mm256_srli_epi16(v, 4), nibble), odd = _mm256_and_si256(v, nibble);
            const __m256i even_low = _mm256_shuffle_epi8(low, even), even_high = _mm256_shuffle_epi8(high, even);
            const __m256i odd_low = _mm256_shuffle_epi8(low, odd), odd_high = _mm256_shuffle_epi8(high, odd);
            a = _mm256_unpacklo_epi8(even_low, even_high), b = _mm256_unpackhi_epi8(even_low, even_high);
            c = _mm256_unpacklo_epi8(odd_low, odd_high), d = _mm256_unpackhi_epi8(odd_low, odd_high);
            scale = from_bf16(scales[k / 64]) * (1.0f / LARGEST);
        } else {
            uint8_t rest[64];
            const uint8_t *at = codes;
            if (k + 64 > cols) at = memcpy(memset(rest, 0, sizeof rest), codes, (size_t)(cols - k));
            a = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)at));
            b = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(at + 16)));
            c = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(at + 32)));
            d = _mm256_cvtepi8_epi16(_mm_loadu_si128((const void *)(at + 48)));
        }
        for (int m = 0; m < M; m++) {
            const __m256i *p = (const void *)(in + (size_t)m * x->width + k);
            const __m256i ab = _mm256_add_epi32(_mm256_madd_epi16(a, _mm256_loadu_si256(p)),
                                                _mm256_madd_epi16(b, _mm256_loadu_si256(p + 1)));
            const __m256i cd = _mm256_add_epi32(_mm256_madd_epi16(c, _mm256_loadu_si256(p + 2)),
                                                _mm256_madd_epi16(d, _mm256_loadu_si256(p + 3)));
            const __m256 factor = _mm256_set1_ps(scale * step[(size_t)m * x->width / 64 + k / 64]);
            sum[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(ab, cd)), factor, sum[m]);
        }
    }
    for (int m = 0; m < M; m += 4) {
        Vec four[4] = {{0}};
        float total[4];
        for (int i = 0; i < 4 && m + i < M; i++) four[i] = sum[m + i];
        sum4(four, total);
        for (int i = 0; i < 4 && m + i < M; i++) y[(m + i) * ldy] = total[i];
    }
    if (kind == INT8)
        for (int m = 0; m < M; m++) y[m * ldy] *= from_bf16(*scales);
}

/* 16 rows for all tokens, up to 8 in a pass (8 sums and 4 registers of weights), while they are in the cache */
static inline __attribute__((always_inline)) void whole_rows(const int kind, const Matrix *w, const int32_t *rows, int first,
                                                             int count, const Input *x, int tokens, float *y, size_t ldy) {
    const size_t codes_row = kind == NF4 ? (size_t)w->cols / 2 : (size_t)w->cols;
    const size_t scales_row = kind == NF4 ? (size_t)w->cols / 64 : 1;
    const int passes = (tokens + 7) / 8;
    for (int from = 0; from < count; from += 16)
        for (int n = 0, pass = 0, M; pass < passes; n += M, pass++) {
            M = (tokens - n + passes - pass - 1) / (passes - pass);
            for (int i = from; i < count && i < from + 16; i++) {
                const size_t row = (size_t)(rows ? rows[i] : first + i);
                const uint8_t *codes = w->codes + row * codes_row;
                const uint16_t *scales = w->scales + row * scales_row;
                float *out = y + (size_t)n * ldy + i;
#define TILE(M) case M: whole_tile(kind, codes, scales, w->cols, x, n, M, out, ldy); break;
                switch (M) { TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6) TILE(7) TILE(8) }
#undef TILE
            }
        }
}

static void nf4_rows(const Matrix *w, const Input *x, int tokens, int r0, int r1, float *y, int ldy, void *scratch) {
    (void)scratch;
    whole_rows(NF4, w, NULL, r0, r1 - r0, x, tokens, y, (size_t)ldy);
}

/* y[n, i] for all tokens and `count` rows of the table; `rows` names them, or they are first, first + 1, .. */
static void int8_rows(const Matrix *w, const int32_t *rows, int first, int count, const Input *x, int tokens, float *y,
                      size_t ldy) {
    whole_rows(INT8, w, rows, first, count, x, tokens, y, ldy);
}

/* ---------------------------------------------------------------------------- without them */
#else

static void nf4_rows(const Matrix *w, const Input *x, int tokens, int r0, int r1, float *y, int ldy, void *scratch) {
    (void)scratch;
    const size_t codes_row = (size_t)w->cols / 2, scales_row = (size_t)w->cols / 64;
    decoded_rows(NF4, w->codes + r0 * codes_row, codes_row, w->scales + r0 * scales_row, scales_row, r1 - r0, w->cols, x,
                 tokens, y, ldy);
}

static void int8_rows(const Matrix *w, const int32_t *rows, int first, int count, const Input *x, int tokens, float *y,
                      size_t ldy) {
    const size_t cols = (size_t)w->cols;
    if (rows == NULL)
        decoded_rows(INT8, w->codes + first * cols, cols, w->scales + first, 1, count, w->cols, x, tokens, y, (int)ldy);
    else
        for (int i = 0; i < count; i++)
            decoded_rows(INT8, w->codes + rows[i] * cols, cols, w->scales + rows[i], 1, 1, w->cols, x, tokens, y + i, (int)ldy);
}
#endif
