// Pages of `crumb serve`, from pages/: they need nothing from elsewhere.
#pragma once

namespace crumb::app {

extern const char* const chat_page;  // /
extern const char* const kv_page;    // /kv

}  // namespace crumb::app
