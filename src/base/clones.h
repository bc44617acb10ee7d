// One function, compiled for several instruction sets and chosen when the program starts. Not under ThreadSanitizer: the
// choice is made before its runtime is there to be told of it, and the program would end there.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__) && !defined(__SANITIZE_THREAD__)
#define CRUMB_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CRUMB_CLONES
#endif
