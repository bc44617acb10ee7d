#include <crumb/error.h>

#include <cstdio>
#include <cstdlib>

namespace crumb {

void broken_invariant(const char* condition, const char* file, int line) {
    std::fprintf(stderr, "crumb: internal error at %s:%d: %s\nPlease report this with the command that you ran.\n", file,
                 line, condition);
    std::abort();
}

}  // namespace crumb
