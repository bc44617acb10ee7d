// Texts that commands read: files of the user, or what tools/fetch.py text put into the cache folder.
#pragma once

#include "session.h"

#include <filesystem>
#include <string>
#include <vector>

namespace crumb::app {

// `half` is "calibration" or "evaluation": documentation, prose and code. Throws Error that says what to type if they have
// not been fetched.
std::vector<std::filesystem::path> fetched_texts(const char* half);

// The first n tokens of a text, without special tokens. Throws Error if it has fewer.
std::vector<llama_token> first_tokens(const llama_model* model, const std::filesystem::path& file, size_t n);

}  // namespace crumb::app
