// One function, compiled for several instruction sets and chosen when the program starts.
#pragma once

#if defined(__x86_64__) && defined(__gnu_linux__)
#define CRUMB_CLONES __attribute__((target_clones("default", "avx2", "avx512f")))
#else
#define CRUMB_CLONES
#endif
