#include "server/tls_files.h"

namespace weft {

void TlsFiles::AddTo(OptionParser& parser, std::string_view prefix, std::string_view certfile_help,
                     std::string_view ca_certs_help) {
  flag_prefix = prefix;
  parser.Add(flag_prefix + "ssl-certfile", &certfile, certfile_help);
  parser.Add(flag_prefix + "ssl-keyfile", &keyfile,
             "Key of that certificate: a PEM file without a passphrase");
  parser.Add(flag_prefix + "ssl-ca-certs", &ca_certs, ca_certs_help);
}

}  // namespace weft
