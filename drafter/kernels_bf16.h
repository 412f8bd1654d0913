/* Products with the bf16 unit: AVX512 with BF16 and VNNI. Activations are bf16; NF4 codes are looked up 32 at a time.
 *
 * Legend: N tokens, R rows and K columns of a matrix; a chunk is 128 columns = 64 bytes of NF4 codes = 2 blocks.
 */

typedef uint16_t Value;
static inline const Value *input_row(const Input *x, int n) { return x->half + (size_t)n * x->width; }

/* ---------------------------------------------------------------------------- activations */

/* In memory a 16-bit word j of a chunk's codes holds the elements 4j+1, 4j, 4j+3, 4j+2, from its low nibble up. The
 * kernel looks up one nibble of all 32 words at a time, so x is kept in that order: place 32 n + j = element
 * 4j + NIBBLE[n]. A 32-bit lane is 2 words = 8 elements, so lanes 0..7 belong to the chunk's first block of 64 and
 * lanes 8..15 to its second: one multiplication by a vector of two scales serves both. */
static const int NIBBLE[4] = {1, 0, 3, 2};

static void order_half(uint16_t *row, int width) { /* in place, natural order to the order of NF4 codes */
    uint16_t natural[128];
    for (int k = 0; k < width; k += 128) {
        memcpy(natural, row + k, sizeof natural);
        for (int n = 0; n < 4; n++)
            for (int j = 0; j < 32; j++) row[k + 32 * n + j] = natural[4 * j + NIBBLE[n]];
    }
}

static void store_input(Input *x, int n, const float *from, int cols, int kind) {
    uint16_t *row = x->half + (size_t)n * x->width;
    int whole = cols / 128 * 128, width = padded(cols);
    __m512i pick[4];
    for (int i = 0; i < 4; i++) {
        uint16_t index[32] = {0};
        for (int j = 0; j < 16; j++) index[j] = (uint16_t)(4 * j + NIBBLE[i]);
        pick[i] = _mm512_loadu_si512(index);
    }
    for (int k = 0; k < whole; k += 128) {
        __m512i v[4]; /* 4 x 32 bf16 in natural order */
        for (int i = 0; i < 4; i++)
            v[i] = (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps(from + k + 32 * i + 16), _mm512_loadu_ps(from + k + 32 * i));
        for (int i = 0; i < 4; i++) {
            __m512i out = v[i];
            if (kind == NF4) {
                __m512i first = _mm512_permutex2var_epi16(v[0], pick[i], v[1]);
                __m512i second = _mm512_permutex2var_epi16(v[2], pick[i], v[3]);
                out = _mm512_inserti64x4(first, _mm512_castsi512_si256(second), 1);
            }
            _mm512_storeu_si512(row + k + 32 * i, out);
        }
    }
    if (whole < width) {
        for (int k = whole; k < width; k++) row[k] = k < cols ? to_bf16(from[k]) : 0;
        if (kind == NF4) order_half(row + whole, 128);
    }
}

/* A row of the adapter's A, bf16 [cols] -> [padded(cols)], in the order in which activations are kept beside NF4. */
static void order_row(const uint16_t *from, uint16_t *to, int cols, int kind) {
    memset(to, 0, sizeof(uint16_t) * (size_t)padded(cols));
    memcpy(to, from, sizeof(uint16_t) * (size_t)cols);
    if (kind == NF4) order_half(to, padded(cols));
}

/* ---------------------------------------------------------------------------- products */

/* Levels times LUT_SCALE lie nearer to bf16 numbers than the levels do (rms error 0.00028 of a block's absmax instead
 * of 0.00046, below the 0.00037 of weights that are cast to bf16); the scale is divided by it again. */
#define LUT_SCALE 1.37457f

static inline __m512i nf4_lut(void) {
    uint16_t table[32]; /* twice, so that the index's fifth bit, a bit of the next nibble, does not matter */
    for (int i = 0; i < 32; i++) table[i] = to_bf16(LEVELS[i & 15] * LUT_SCALE);
    return _mm512_loadu_si512(table);
}

static inline __m512 dot(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

/* [s0 x 8, s1 x 8] from two neighbouring bf16 scales; a chunk of one block has no second */
static inline __m512 two_scales(const uint16_t *scales, int blocks) {
    uint32_t both = scales[0];
    if (blocks > 1) memcpy(&both, scales, 4);
    const __m512i shift = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 16, 16, 16, 16, 16, 16, 16, 16);
    __m512i bits = _mm512_and_si512(_mm512_sllv_epi32(_mm512_set1_epi32((int)both), shift), _mm512_set1_epi32(-65536));
    return _mm512_castsi512_ps(bits);
}

/* y[n] = row . x[n] for R rows and M tokens: 4 R look-ups, 4 R M products and R M sums for 128 columns. Two rows share
 * what is loaded of x: 6 tokens of 6,144 columns are 72 KB, and loads from the second cache take longer than products. */
static inline __attribute__((always_inline)) void nf4_tile(const Matrix *w, int r, const int R, const Input *x, int first,
                                                           const int M, float *y, int ldy, __m512i lut) {
    const int cols = w->cols, whole = cols / 128 * 128;
    const uint8_t *codes = w->codes + (size_t)r * cols / 2;
    const uint16_t *scales = w->scales + (size_t)r * cols / 64, *in = input_row(x, first);
    const size_t next_codes = (size_t)cols / 2, next_scales = (size_t)cols / 64, next = (size_t)x->width;
    __m512 sum[2][6]; /* arrays of a length that the compiler knows: it keeps no other in registers */
    for (int i = 0; i < R; i++)
        for (int m = 0; m < M; m++) sum[i][m] = _mm512_setzero_ps();
#define CHUNK(VECTOR, BLOCKS)                                                                     \
    {                                                                                             \
        __m512i w0[2], w1[2], w2[2], w3[2];                                                       \
        __m512 scale[2];                                                                          \
        for (int i = 0; i < R; i++) {                                                             \
            const uint8_t *at = codes + i * next_codes + k / 2;                                   \
            __m512i v = VECTOR;                                                                   \
            w0[i] = _mm512_permutexvar_epi16(v, lut);                                             \
            w1[i] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), lut);                       \
            w2[i] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), lut);                       \
            w3[i] = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), lut);                      \
            scale[i] = two_scales(scales + i * next_scales + k / 64, BLOCKS);                     \
        }                                                                                         \
        for (int m = 0; m < M; m++) {                                                             \
            const uint16_t *p = in + m * next + k;                                                \
            __m512i x0 = _mm512_loadu_si512(p), x1 = _mm512_loadu_si512(p + 32);                  \
            __m512i x2 = _mm512_loadu_si512(p + 64), x3 = _mm512_loadu_si512(p + 96);             \
            __asm__("" : "+v"(x0), "+v"(x1), "+v"(x2), "+v"(x3)); /* loaded once for both rows */ \
            for (int i = 0; i < R; i++) {                                                         \
                __m512 a = dot(dot(_mm512_setzero_ps(), w0[i], x0), w1[i], x1);                   \
                a = dot(dot(a, w2[i], x2), w3[i], x3);                                            \
                sum[i][m] = _mm512_fmadd_ps(a, scale[i], sum[i][m]);                              \
            }                                                                                     \
        }                                                                                         \
    }
    int k = 0;
    for (; k < whole; k += 128) {
        for (int i = 0; i < R; i++) /* 4 KB ahead: a row or more of any matrix */
            _mm_prefetch((const char *)codes + i * next_codes + k / 2 + 4096, _MM_HINT_T0);
        CHUNK(_mm512_loadu_si512(at), 2)
    }
    if (whole < cols) CHUNK(_mm512_castsi256_si512(_mm256_loadu_si256((const void *)at)), 1)
#undef CHUNK
    for (int m = 0; m < M; m++)
        for (int i = 0; i < R; i++) y[(size_t)m * ldy + i] = _mm512_reduce_add_ps(sum[i][m]) * (1 / LUT_SCALE);
}

/* One row's weights as bf16(level * scale), what a merged model holds, in code order */
static void nf4_decode_row(const Matrix *w, int r, uint16_t *out) {
    const int cols = w->cols;
    const uint8_t *codes = w->codes + (size_t)r * cols / 2;
    const uint16_t *scales = w->scales + (size_t)r * cols / 64;
    const __m512 levels = _mm512_loadu_ps(LEVELS);
    for (int k = 0; k < cols; k += 128, out += 128) {
        __m512 piece[2][4];
        for (int block = 0; block < 2; block++) {
            if (k + 64 * block >= cols) { /* no second block: its places meet zeros of x, but must not be NaN */
                for (int i = 0; i < 4; i++) piece[block][i] = _mm512_setzero_ps();
                continue;
            }
            __m512i v = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(codes + k / 2 + 32 * block)));
            __m512 scale = _mm512_set1_ps(from_bf16(scales[k / 64 + block]));
            piece[block][0] = _mm512_mul_ps(_mm512_permutexvar_ps(v, levels), scale);
            piece[block][1] = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 4), levels), scale);
            piece[block][2] = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 8), levels), scale);
            piece[block][3] = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(v, 12), levels), scale);
        }
        for (int i = 0; i < 4; i++)
            _mm512_storeu_si512(out + 32 * i, (__m512i)_mm512_cvtne2ps_pbh(piece[1][i], piece[0][i]));
    }
}

/* sums of four registers, each over its 16 lanes */
static inline __m128 sum4(__m512 a, __m512 b, __m512 c, __m512 d) {
    __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); /* a b a b in each 128 bits */
    __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
    __m512 abcd = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
    __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* M tokens x 4 rows of bf16: with M = 6 a step of 32 columns is 10 loads and 24 products, bound by the products */
static inline __attribute__((always_inline)) void dense_tile(const uint16_t *w, size_t ldw, int cols, const Input *x,
                                                             int first, const int M, float *y, int ldy) {
    const int whole = cols / 32 * 32;
    const uint16_t *in[6];
    __m512 sum[6][4];
    for (int m = 0; m < M; m++) {
        in[m] = input_row(x, first + m);
        for (int i = 0; i < 4; i++) sum[m][i] = _mm512_setzero_ps();
    }
    for (int k = 0; k < whole; k += 32) {
        __m512i rows[4];
        for (int i = 0; i < 4; i++) rows[i] = _mm512_loadu_si512(w + i * ldw + k);
        for (int m = 0; m < M; m++) {
            __m512i value = _mm512_loadu_si512(in[m] + k);
            for (int i = 0; i < 4; i++) sum[m][i] = dot(sum[m][i], rows[i], value);
        }
    }
    if (whole < cols) {
        __mmask32 rest = (__mmask32)((1u << (cols - whole)) - 1);
        for (int m = 0; m < M; m++)
            for (int i = 0; i < 4; i++)
                sum[m][i] = dot(sum[m][i], _mm512_maskz_loadu_epi16(rest, w + i * ldw + whole),
                                _mm512_loadu_si512(in[m] + whole));
    }
    for (int m = 0; m < M; m++) _mm_storeu_ps(y + (size_t)m * ldy, sum4(sum[m][0], sum[m][1], sum[m][2], sum[m][3]));
}

/* one row, one token: the sums of dense_tile in the order of dense_tile */
static float dense_one(const uint16_t *w, int cols, const uint16_t *x) {
    __m512 sum = _mm512_setzero_ps();
    int k = 0;
    for (; k + 32 <= cols; k += 32) {
        _mm_prefetch((const char *)(w + k) + 4096, _MM_HINT_T0);
        sum = dot(sum, _mm512_loadu_si512(w + k), _mm512_loadu_si512(x + k));
    }
    if (k < cols)
        sum = dot(sum, _mm512_maskz_loadu_epi16((__mmask32)((1u << (cols - k)) - 1), w + k), _mm512_loadu_si512(x + k));
    return _mm_cvtss_f32(sum4(sum, sum, sum, sum));
}

static inline void dense_panel(const uint16_t *w, size_t ldw, int cols, const Input *x, int n, int M, float *y, int ldy) {
    switch (M) {
    case 6: dense_tile(w, ldw, cols, x, n, 6, y, ldy); break;
    case 5: dense_tile(w, ldw, cols, x, n, 5, y, ldy); break;
    case 4: dense_tile(w, ldw, cols, x, n, 4, y, ldy); break;
    case 3: dense_tile(w, ldw, cols, x, n, 3, y, ldy); break;
    case 2: dense_tile(w, ldw, cols, x, n, 2, y, ldy); break;
    default: dense_tile(w, ldw, cols, x, n, 1, y, ldy);
    }
}

enum { TILE = 32 }; /* rows that all tokens meet before the next: 32 x 2,048 bf16 = 128 KB, an eighth of a second cache */

/* rows [r0, r1) of bf16, the first at w, for all tokens; y points at token 0, row r0 */
static void dense_rows(const uint16_t *w, size_t ldw, int cols, const Input *x, int tokens, int r0, int r1, float *y,
                       int ldy) {
    const int rows = r1 - r0;
    if (tokens == 0) return;
    if (tokens == 1 && cols > 128) { /* one row after the other, as memory streams them */
        for (int r = 0; r < rows; r++) y[r] = dense_one(w + (size_t)r * ldw, cols, input_row(x, 0));
        return;
    }
    const int panels = (tokens + 5) / 6;
    for (int first = 0; first < rows; first += TILE) {
        const int end = first + TILE < rows ? first + TILE : rows, fours = first + (end - first) / 4 * 4;
        /* the next tile comes from memory while this one is at work, a part of it before each panel */
        const char *next = (const char *)(w + (size_t)end * ldw), *behind = (const char *)(w + (size_t)rows * ldw);
        const size_t part = ((size_t)TILE * ldw * sizeof(uint16_t) / panels + 63) / 64 * 64;
        for (int n = 0; n < tokens; n += 6) { /* a panel of 6 tokens stays in the first cache */
            for (const char *line = next; line < next + part && line < behind; line += 64) _mm_prefetch(line, _MM_HINT_T1);
            next += part;
            const int M = tokens - n < 6 ? tokens - n : 6;
            float *out = y + (size_t)n * ldy;
            for (int r = first; r < fours; r += 4) dense_panel(w + (size_t)r * ldw, ldw, cols, x, n, M, out + r, ldy);
            for (int r = fours; r < end; r++)
                for (int m = 0; m < M; m++)
                    out[(size_t)m * ldy + r] = dense_one(w + (size_t)r * ldw, cols, input_row(x, n + m));
        }
    }
}

/* From this many tokens on a row is decoded once to bf16 and multiplied as such. At 17 both ways take the same time, at
 * 576, 2,048 and 6,144 columns alike; at 64 decoding takes a fifth less. A number, not a measurement at load: the two
 * round differently, and what is drafted must not depend on the minute in which a server started. */
#define DECODE_FROM 17

static void nf4_rows(const Matrix *w, const Input *x, int tokens, int r0, int r1, float *y, int ldy, uint16_t *scratch) {
    if (tokens >= DECODE_FROM) {
        const int width = padded(w->cols);
        for (int r = r0; r < r1; r += TILE) {
            int end = r + TILE < r1 ? r + TILE : r1;
            for (int i = r; i < end; i++) nf4_decode_row(w, i, scratch + (size_t)(i - r) * width);
            dense_rows(scratch, width, width, x, tokens, r, end, y + (r - r0), ldy);
        }
        return;
    }
    const __m512i lut = nf4_lut();
    const int passes = (tokens + 5) / 6; /* of up to 6 tokens: 12 sums, 8 look-ups, 4 of x and 2 scales fill the registers */
    for (int first = r0; first < r1; first += 16) /* 16 rows stay in the cache for the next pass */
        for (int n = 0, pass = 0, M; pass < passes; n += M, pass++) {
            M = (tokens - n + passes - pass - 1) / (passes - pass);
            const int end = first + 16 < r1 ? first + 16 : r1;
            float *out = y + (size_t)n * ldy - r0;
            int r = first;
#define TILES(M)                                                                         \
    case M:                                                                              \
        for (; r + 2 <= end; r += 2) nf4_tile(w, r, 2, x, n, M, out + r, ldy, lut);      \
        for (; r < end; r++) nf4_tile(w, r, 1, x, n, M, out + r, ldy, lut);              \
        break;
            switch (M) { TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6) }
#undef TILES
        }
}

/* Fixed-point activations of INT8 tables: |q| <= 127 * 128, high = round(q / 128) in -127..127, low in -64..63 */
typedef struct {
    int8_t *high, *low; /* [N, width] */
    float *step;        /* [N] */
    int64_t *offset;    /* [N]: 128 * sum(128 high + low), what adding 128 to each code adds to the sum */
    int width;
} Fixed;

static void store_fixed(Fixed *x, int n, const float *from, int cols) {
    float largest = 1e-30f;
    for (int k = 0; k < cols; k++) largest = fmaxf(largest, fabsf(from[k]));
    const float step = largest / (127 * 128);
    int8_t *high = x->high + (size_t)n * x->width, *low = x->low + (size_t)n * x->width;
    int64_t total = 0;
    for (int k = 0; k < x->width; k++) {
        int q = k < cols ? (int)rintf(from[k] / step) : 0;
        int h = (q + 64) >> 7;
        high[k] = (int8_t)h, low[k] = (int8_t)(q - 128 * h);
        total += q;
    }
    x->step[n] = step, x->offset[n] = 128 * total;
}

/* 128 high + low - offset of four tokens, from their registers: 64 bits, as 128 high may not fit in 32 */
static inline __m256i whole_sums(const __m512i *high, const __m512i *low, const int64_t *offset) {
    __m256i sums[2];
    for (int half = 0; half < 2; half++) {
        const __m512i *v = half ? low : high;
        __m512i ab = _mm512_add_epi32(_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
        __m512i cd = _mm512_add_epi32(_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
        __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd));
        __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
        __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
        sums[half] = _mm256_cvtepi32_epi64(four);
    }
    const __m256i sum = _mm256_add_epi64(_mm256_slli_epi64(sums[0], 7), sums[1]);
    return _mm256_sub_epi64(sum, _mm256_loadu_si256((const void *)offset));
}

/* logits of 4 tokens (or 1) for R rows of the table, codes[i]: u8 x s8 products of VNNI; codes + 128 are unsigned (an
 * exclusive or). Sums are whole numbers, so their order does not matter. */
static inline __attribute__((always_inline)) void int8_tile(const uint8_t *const *codes, const float *scales, const int R,
                                                            int cols, const Fixed *x, int first, const int M, float *y,
                                                            size_t ldy) {
    const __m512i flip = _mm512_set1_epi8((char)0x80);
    __m512i high[2][4], low[2][4];
    for (int i = 0; i < R; i++)
        for (int m = 0; m < 4; m++) high[i][m] = low[i][m] = _mm512_setzero_si512();
    const int8_t *at_high = x->high + (size_t)first * x->width, *at_low = x->low + (size_t)first * x->width;
    const size_t next = (size_t)x->width;
#define STEP(LOAD)                                                                                 \
    {                                                                                              \
        __m512i code[2];                                                                           \
        for (int i = 0; i < R; i++) code[i] = _mm512_xor_si512(LOAD, flip);                        \
        for (int m = 0; m < M; m++) {                                                              \
            __m512i h = _mm512_loadu_si512(at_high + m * next + k);                                \
            __m512i l = _mm512_loadu_si512(at_low + m * next + k);                                 \
            __asm__("" : "+v"(h), "+v"(l)); /* loaded once for both rows */                        \
            for (int i = 0; i < R; i++) {                                                          \
                high[i][m] = _mm512_dpbusd_epi32(high[i][m], code[i], h);                          \
                low[i][m] = _mm512_dpbusd_epi32(low[i][m], code[i], l);                            \
            }                                                                                      \
        }                                                                                          \
    }
    int k = 0;
    for (; k + 64 <= cols; k += 64) {
        for (int i = 0; i < R; i++) _mm_prefetch((const char *)codes[i] + k + 4096, _MM_HINT_T0);
        STEP(_mm512_loadu_si512(codes[i] + k))
    }
    if (k < cols) STEP(_mm512_maskz_loadu_epi8((1ull << (cols - k)) - 1, codes[i] + k)) /* x is 0 behind the end */
#undef STEP
    for (int i = 0; i < R; i++) {
        float value[4];
        int64_t offset[4] = {0};
        for (int m = 0; m < M; m++) offset[m] = x->offset[first + m];
        _mm_storeu_ps(value, _mm256_cvtepi64_ps(whole_sums(high[i], low[i], offset)));
        for (int m = 0; m < M; m++) y[(size_t)m * ldy + i] = value[m] * (x->step[first + m] * scales[i]);
    }
}

/* y[n, i] for all tokens and `count` rows of the table; `rows` names them, or they are first, first + 1, .. */
static void int8_rows(const Matrix *w, const int32_t *rows, int first, int count, const Fixed *x, int tokens, float *y,
                      size_t ldy) {
    for (int i = 0; i < count; i += 2) {
        const int R = count - i < 2 ? 1 : 2;
        const uint8_t *codes[2] = {0};
        float scales[2] = {0};
        for (int j = 0; j < R; j++) {
            const int id = rows ? rows[i + j] : first + i + j;
            codes[j] = w->codes + (size_t)id * w->cols, scales[j] = from_bf16(w->scales[id]);
        }
        for (int n = 0; n < tokens;) {
            float *out = y + (size_t)n * ldy + i;
            const int M = tokens - n < 4 ? 1 : 4;
            if (R == 2 && M == 4) int8_tile(codes, scales, 2, w->cols, x, n, 4, out, ldy);
            else if (R == 2) int8_tile(codes, scales, 2, w->cols, x, n, 1, out, ldy);
            else if (M == 4) int8_tile(codes, scales, 1, w->cols, x, n, 4, out, ldy);
            else int8_tile(codes, scales, 1, w->cols, x, n, 1, out, ldy);
            n += M;
        }
    }
}
