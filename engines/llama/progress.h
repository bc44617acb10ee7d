// How far a long computation is: one line that is rewritten on a terminal, a line every tenth elsewhere.
#pragma once

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace crumb::llama {

class Progress {
  public:
    // `all`: the work, in any unit.
    Progress(std::string what, double all) : what_(std::move(what)), all_(all) {}

    // `detail` says in words what `done` is.
    void at(double done, const std::string& detail) {
        const int left = int(seconds() / done * (all_ - done) + 0.5), tenth = int(done * 10 / all_);
        const bool last = done >= all_;
        if (!terminal_ && tenth == tenth_ && !last) {
            return;
        }
        tenth_ = tenth;
        std::fprintf(stderr, "%s%s: %s, %d:%02d left%s", terminal_ ? "\r" : "", what_.c_str(), detail.c_str(),
                     left / 60, left % 60, terminal_ && !last ? "  " : "\n");
    }

    double seconds() const { return std::chrono::duration<double>(Clock::now() - start_).count(); }

  private:
    using Clock = std::chrono::steady_clock;
    const std::string what_;
    const double all_;
    const bool terminal_ = isatty(STDERR_FILENO);
    const Clock::time_point start_ = Clock::now();
    int tenth_ = 0;
};

}  // namespace crumb::llama
