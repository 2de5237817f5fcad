// The vectors of the tier that this translation unit is compiled for. All that is particular to a
// tier is in its header, vec_<tier>.h, which defines, inside namespace sgl_kernel::SGL_TIER and
// with internal linkage:
//
//   Vec, kLanes                 f32 vector and its width
//   zero, set1, load, store     as everywhere; addresses need no alignment
//   add, sub, mul, div, fma     lane by lane; fma(a, b, c) is a * b + c
//   max                         lane by lane; of a NaN either operand
//   select_less(a, b, x, y)     a < b ? x : y
//   select_nan(a, x)            a where it is NaN, else x
//   reduce_add, reduce_max      over the lanes
//   kReducesNeighbours          reduce_add first adds neighbours, else one half to the other
//   transpose(Vec[kLanes])      of a square of f32
//   exp_from(p, t, n, x, least) p * 2^n, n also the integer in the low mantissa bits of t; 0 where
//                               x is below `least`, NaN where it is NaN
//
// what widens and narrows:
//   load_act                    kLanes activations (bf16_t*, fp16_t*), cached e4m3 (e4m3_t*), or
//                               weights as fp16 bits (E4m3AsFp16*), as f32, exact
//   store_out(float* | bf16_t* | fp16_t*, Vec) one rounding, to nearest even
//   even_k, odd_k               one k of each of kLanes bf16 pairs (moved as bits), as f32
//   widen_pairs                 kLanes fp16 pairs (fp16_t*) as f32, exact: even k and odd k apart
//   E4m3AsFp16, kE4m3AsFp16Scale, e4m3_to_fp16_bits, NanWatch
//                               e4m3 pairs as fp16 bits, even k and odd k apart
//
// and the register tiles, accumulators next to what a loop loads and broadcasts:
//   kMR, kNRVecs                of the GEMM family's micro-kernel, rows x vectors
//   kUnrollK                    the unroll of its loop over k pairs
//   kAccumulatorsWhileWidening  vectors of accumulators that leave registers to widen e4m3 in it
//   kQkKeys, kQkVecs            of attention's QK^T, keys x vectors of query rows
//   kPvRows, kPvVecs            of softmax weights times V, query rows x vectors of columns
//   kDirectPvVecs               vectors of columns of the same for up to 4 rows without panels
//
// A tier that multiplies bf16 pairs names its dot policies in SGL_TIER_DOT, a header; dot.h
// includes it. For them it defines load_pairs and kPairVecs, weights as bf16 pairs, exact, and
// dot_bf16, the pair dot product, where it is an instruction on vectors.
#pragma once

#if !defined(SGL_TIER) || !defined(SGL_TIER_HEADER)
#error "compile with -DSGL_TIER=<tier> and -DSGL_TIER_HEADER=<its header>; see cmake/tiers.cmake"
#endif

#include SGL_TIER_HEADER
