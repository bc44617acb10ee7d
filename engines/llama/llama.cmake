# The pinned llama.cpp with crumb's hooks, as one target: crumb_llama.
#
# engines/llama/build.sh builds it into the cache folder and prints the prefix; `make` passes that on as
# CRUMB_LLAMA_PREFIX. Here nothing of it is built or downloaded.
#
#   crumb_llama              headers, libllama, libllama-common, ggml, libmtmd, and the tools as libraries:
#                            llama_server, llama_cli, llama_completion, llama_perplexity, llama_bench,
#                            llama_batched_bench, llama_quantize (int (int argc, char ** argv))

set(CRUMB_LLAMA_PREFIX "" CACHE PATH "What engines/llama/build.sh prints: the folder of src/ and build/ of the hooked llama.cpp")

if(NOT CRUMB_LLAMA_PREFIX)
    message(FATAL_ERROR
        "CRUMB_LLAMA_PREFIX is not set: the llama.cpp that crumb builds on is unknown.\n"
        "Type: make setup && make build\n"
        "or, by hand: cmake -S . -B build -G Ninja -DCRUMB_LLAMA_PREFIX=\"$(engines/llama/build.sh)\"")
endif()
if(NOT EXISTS "${CRUMB_LLAMA_PREFIX}/complete")
    message(FATAL_ERROR
        "CRUMB_LLAMA_PREFIX is ${CRUMB_LLAMA_PREFIX}, and there is no finished build of llama.cpp.\n"
        "Type: make setup && make build")
endif()

set(_crumb_llama_bin "${CRUMB_LLAMA_PREFIX}/build/bin")
add_library(crumb_llama INTERFACE)
# SYSTEM: llama.cpp's headers are not ours to keep free of warnings. vendor/ comes last, and as -idirafter, so that its
# copies of libraries that Debian has too are taken only where there is no other.
target_include_directories(crumb_llama SYSTEM INTERFACE
    "${CRUMB_LLAMA_PREFIX}/src/include"
    "${CRUMB_LLAMA_PREFIX}/src/src"
    "${CRUMB_LLAMA_PREFIX}/src/ggml/include"
    "${CRUMB_LLAMA_PREFIX}/src/common"
    "${CRUMB_LLAMA_PREFIX}/src/tools/server"
    "${CRUMB_LLAMA_PREFIX}/src/tools/mtmd")
target_compile_options(crumb_llama INTERFACE "SHELL:-idirafter \"${CRUMB_LLAMA_PREFIX}/src/vendor\"")

# dependents first, as a linker wants them
foreach(_crumb_llama_name IN ITEMS
        llama-server-impl llama-cli-impl llama-completion-impl llama-perplexity-impl llama-bench-impl
        llama-batched-bench-impl llama-quantize-impl mtmd llama-common llama ggml ggml-cpu ggml-base)
    set(_crumb_llama_file "${_crumb_llama_bin}/lib${_crumb_llama_name}.so")
    if(NOT EXISTS "${_crumb_llama_file}")
        message(FATAL_ERROR "${_crumb_llama_file} is missing: the build of llama.cpp is damaged.\n"
            "Type: rm -r ${CRUMB_LLAMA_PREFIX} && make setup")
    endif()
    add_library(crumb_llama::${_crumb_llama_name} SHARED IMPORTED GLOBAL)
    set_target_properties(crumb_llama::${_crumb_llama_name} PROPERTIES IMPORTED_LOCATION "${_crumb_llama_file}")
    target_link_libraries(crumb_llama INTERFACE crumb_llama::${_crumb_llama_name})
endforeach()
# found in the cache folder from the build folder and after an install alike
target_link_options(crumb_llama INTERFACE "LINKER:-rpath,${_crumb_llama_bin}")

unset(_crumb_llama_bin)
unset(_crumb_llama_name)
unset(_crumb_llama_file)
