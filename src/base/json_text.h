// JSON as one line of text. Names of files may hold any byte, and JSON is UTF-8: what is not becomes U+FFFD.
#pragma once

#include <nlohmann/json.hpp>

#include <string>

namespace crumb {

template <class Json>
std::string json_text(const Json& json, int indent = -1) {
    return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

}  // namespace crumb
