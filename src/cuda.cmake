# The CUDA side. CMake 3.25 knows no flag for CUDA C++20 and would silently compile C++17, so it is told. Codes must be
# those of the CPU: multiply-adds are fused where the source says so, and only there. The runtime is linked statically, so
# that programs can be carried to a machine that has nothing but a driver.
if(NOT CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 90a)
endif()
if(CCACHE)
    set(CMAKE_CUDA_COMPILER_LAUNCHER ${CCACHE})
endif()
enable_language(CUDA)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_FLAGS_RELWITHDEBINFO "-O3 -lineinfo")
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
find_package(CUDAToolkit 13 REQUIRED)

# Formats with decode kernels: one file each. A regular expression picks some of them, for builds in a hurry.
set(CRUMB_CUDA_FORMATS "." CACHE STRING "Which files of src/attention/cuda/instances to build (regular expression)")
file(GLOB instances CONFIGURE_DEPENDS src/attention/cuda/instances/*.cu)
list(FILTER instances INCLUDE REGEX "/[^/]*${CRUMB_CUDA_FORMATS}[^/]*$")
set(list "")
foreach(file ${instances})
    get_filename_component(name ${file} NAME_WE)
    string(APPEND list "CRUMB_INSTANCE(${name})\n")
endforeach()
file(GENERATE OUTPUT ${PROJECT_BINARY_DIR}/generated/cuda_instances.inc CONTENT "${list}")

add_library(crumb_cuda STATIC ${instances} src/attention/cuda/registry.cu src/attention/cuda/prefill.cu src/recipe/cuda/append.cu)
target_include_directories(crumb_cuda PRIVATE src ${PROJECT_BINARY_DIR}/generated)
target_compile_options(crumb_cuda PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr -fmad=false -Xcompiler=-ffp-contract=off>)
target_link_libraries(crumb_cuda PUBLIC crumb CUDA::cudart_static)
