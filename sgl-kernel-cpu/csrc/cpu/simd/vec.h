// Picks the vector type of the tier this translation unit is compiled for.
//
// A tier header defines, inside namespace sgl_kernel::SGL_TIER and with internal linkage:
//   Vec, kLanes                 f32 vector and its width
//   kMicroRows, kMicroVecs      the register tile of the panel kernel (rows x vectors)
//   kMicroUnroll                k pairs of a pass of its loop
//   kSumsBesideWords            vectors of sums in registers while words are made in that loop
//   zero, set1, load, store, add, mul, fma
//   load_act(const bf16_t* | const fp16_t*)   kLanes activations, or weight words, as f32
//   even_k, odd_k               one k of each of kLanes bf16 pairs (moved as bits), as f32
//   widen_pairs                 kLanes fp16 pairs (fp16_t*) as f32, exact: even k and odd k apart
//   store_out(float* | bf16_t* | fp16_t*, Vec) one rounding, to nearest even
//   Word, kWordScale, codes_to_words, NanWatch   e4m3 pairs as 16-bit words that load_act widens,
//                               even k and odd k apart
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
