# The only home of -m flags: one object library per ISA tier, built from the same sources.

set(SGL_TIER_SOURCES csrc/cpu/gemm/gemm_bf16.cpp csrc/cpu/gemm/gemm_fp8.cpp csrc/cpu/gemm/gemm_fp16.cpp csrc/cpu/simd/machine_limits.cpp
                     csrc/cpu/transformer/activation.cpp csrc/cpu/attention/decode_attention.cpp csrc/cpu/attention/extend_attention.cpp
                     csrc/cpu/transformer/norm.cpp csrc/cpu/transformer/qk_norm_rope_store.cpp
                     csrc/cpu/transformer/routing.cpp)

set(SGL_FLAGS_scalar "")
set(SGL_FLAGS_neon "")
set(SGL_FLAGS_neon_bf16 -march=armv8.2-a+bf16)
set(SGL_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(SGL_FLAGS_avx512 ${SGL_FLAGS_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
set(SGL_FLAGS_avx512_bf16 ${SGL_FLAGS_avx512} -mavx512bf16)
set(SGL_FLAGS_amx ${SGL_FLAGS_avx512} -mavx512vbmi -mamx-tile -mamx-bf16)

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(SGL_ALL_TIERS scalar avx2 avx512 avx512_bf16 amx)
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "^(aarch64|arm64)$")
  set(SGL_ALL_TIERS scalar neon neon_bf16)
else()
  set(SGL_ALL_TIERS scalar)
endif()

# A build for tests may have only some of them: -DSGL_TIERS="scalar;avx2".
if(NOT SGL_TIERS)
  set(SGL_TIERS ${SGL_ALL_TIERS})
endif()
list(TRANSFORM SGL_TIERS REPLACE "(.+)" "SGL_BUILT(\\1)" OUTPUT_VARIABLE SGL_BUILT_TIERS)
list(JOIN SGL_BUILT_TIERS " " SGL_BUILT_TIERS)
set_source_files_properties(csrc/cpu/dispatch/kernel_table.cpp PROPERTIES COMPILE_DEFINITIONS
                            "SGL_BUILT_TIERS=${SGL_BUILT_TIERS}")

foreach(tier IN LISTS SGL_TIERS)
  add_library(sgl_tier_${tier} OBJECT ${SGL_TIER_SOURCES})
  target_include_directories(sgl_tier_${tier} PRIVATE csrc/cpu)
  target_compile_definitions(sgl_tier_${tier} PRIVATE SGL_TIER=${tier}
                             SGL_TIER_HEADER="simd/vec_${tier}.h")
  target_compile_options(sgl_tier_${tier} PRIVATE ${SGL_FLAGS_${tier}})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC's own AVX-512 headers read undefined vectors on purpose (GCC bug 105593).
    target_compile_options(sgl_tier_${tier} PRIVATE -Wno-maybe-uninitialized -Wno-uninitialized)
  endif()
endforeach()
