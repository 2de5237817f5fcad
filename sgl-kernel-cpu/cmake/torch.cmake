# LibTorch's stable ABI: headers of the Torch at hand, symbols of Torch 2.10 and later only.

find_package(Python REQUIRED COMPONENTS Interpreter)
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import os, torch; print(os.path.dirname(torch.__file__), end='')"
  OUTPUT_VARIABLE SGL_TORCH_DIR
  RESULT_VARIABLE SGL_TORCH_RESULT)
if(NOT SGL_TORCH_RESULT EQUAL 0)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch; install Torch 2.10 or later there first")
endif()

add_library(sgl_torch_stable INTERFACE)
target_include_directories(sgl_torch_stable SYSTEM INTERFACE "${SGL_TORCH_DIR}/include")
target_compile_definitions(sgl_torch_stable INTERFACE TORCH_TARGET_VERSION=0x020a000000000000)
# By soname only: at run time it is the libtorch_cpu that `import torch` has already loaded.
target_link_libraries(sgl_torch_stable INTERFACE "${SGL_TORCH_DIR}/lib/libtorch_cpu.so")
target_link_options(sgl_torch_stable INTERFACE -Wl,--allow-shlib-undefined)
set(CMAKE_SKIP_RPATH ON)
