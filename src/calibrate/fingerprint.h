// XXH3-128 of bytes that come in pieces, as `xxh128sum` prints it.
#pragma once

#include <cstddef>
#include <span>
#include <string>

struct XXH3_state_s;

namespace crumb {

class Fingerprint {
  public:
    Fingerprint();
    ~Fingerprint();
    Fingerprint(const Fingerprint&) = delete;
    Fingerprint& operator=(const Fingerprint&) = delete;

    void add(std::span<const std::byte> bytes);
    template <class T>
    void add_value(const T& value) {
        add(std::as_bytes(std::span(&value, 1)));
    }
    void add_text(const std::string& text);  // with its length, so that two texts do not run into one

    std::string hex() const;

  private:
    XXH3_state_s* state_;
};

}  // namespace crumb
