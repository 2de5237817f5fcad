// Picks the vector type of the tier this translation unit is compiled for.
//
// A tier header defines, inside namespace sgl_kernel::SGL_TIER and with internal linkage:
//   Vec, kLanes                 f32 vector and its width
//   kMR, kNRVecs                the register tile of the micro-kernel (rows x vectors)
//   kUnrollK                    the unroll of its loop over k pairs
//   kAccumulatorsWhileWidening  vectors of accumulators that leave registers to widen e4m3 in it
//   zero, set1, load, store, add, mul, fma
//   load_act                    kLanes activations (bf16_t*, fp16_t*) or e4m3 weights as fp16 bits
//                               (E4m3AsFp16*), as f32
//   even_k, odd_k               one k of each of kLanes bf16 pairs (moved as bits), as f32
//   widen_pairs                 kLanes fp16 pairs (fp16_t*) as f32, exact: even k and odd k apart
//   store_out(float* | bf16_t* | fp16_t*, Vec) one rounding, to nearest even
//   E4m3AsFp16, kE4m3AsFp16Scale, e4m3_to_fp16_bits, NanWatch
//                               e4m3 pairs as fp16 bits, even k and odd k apart
//   SGL_HAS_BF16_DOT, dot_bf16  the bf16 pair dot product, where there is one
//   load_pairs, kPairVecs       weights as bf16 pairs, exact; where dot.h uses them
#pragma once

#if !defined(SGL_TIER)
#error "compile with -DSGL_TIER=<tier> and -DSGL_TIER_<TIER>; see cmake/tiers.cmake"
#endif

#if defined(SGL_TIER_AVX512) || defined(SGL_TIER_AVX512_BF16) || defined(SGL_TIER_AMX)
#include "simd/vec_avx512.h"
#elif defined(SGL_TIER_AVX2)
#include "simd/vec_avx2.h"
#elif defined(SGL_TIER_NEON) || defined(SGL_TIER_NEON_BF16)
#include "simd/vec_neon.h"
#elif defined(SGL_TIER_SCALAR)
#include "simd/vec_scalar.h"
#else
#error "unknown tier"
#endif
