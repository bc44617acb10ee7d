// Two kinds of failure. What a user can cause (a flag, a file, a shape, a full cache) throws Error, whose text says what
// was wrong with the values seen, why, and what to type instead. What only a bug can cause aborts.
#pragma once

#include <fmt/format.h>

#include <stdexcept>
#include <string>

namespace crumb {

class Error : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

template <class... Args> [[noreturn]] void fail(fmt::format_string<Args...> text, Args&&... args) {
    throw Error(fmt::format(text, std::forward<Args>(args)...));
}

[[noreturn]] void broken_invariant(const char* condition, const char* file, int line);

}  // namespace crumb

#define CRUMB_ASSERT(condition) \
    ((condition) ? static_cast<void>(0) : ::crumb::broken_invariant(#condition, __FILE__, __LINE__))
