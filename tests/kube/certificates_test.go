package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// certificates holds the files that a control plane starts with, issued by one CA of the test.
type certificates struct {
	dir string
	// Certificate of the CA, and certificate and key of the server and of clients, in PEM.
	ca, serverCert, serverKey, clientCert, clientKey string
	// The key that signs tokens of service accounts, and the file with the only user.
	serviceAccountKey, tokens string
}

// token is the bearer token of the user, who has all permissions.
const token = "some-token"

// certificateSerial numbers the certificates: serials of one CA must differ.
var certificateSerial int64

func newCertificates(t *testing.T) *certificates {
	t.Helper()
	c := &certificates{dir: t.TempDir()}
	caKey := newKey(t)
	ca := template("rangecache test CA")
	ca.IsCA, ca.BasicConstraintsValid, ca.KeyUsage = true, true, x509.KeyUsageCertSign|x509.KeyUsageDigitalSignature
	c.ca = c.writeCertificate(t, "ca.crt", ca, ca, caKey, caKey)

	server := template("server")
	server.IPAddresses, server.DNSNames = []net.IP{net.IPv4(127, 0, 0, 1)}, []string{"localhost"}
	// etcd's own gateway before 3.7 uses the server's certificate as a client.
	server.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	serverKey := newKey(t)
	c.serverCert = c.writeCertificate(t, "server.crt", server, ca, serverKey, caKey)
	c.serverKey = c.writeKey(t, "server.key", serverKey)

	// Without a common name, which etcd's auth would take for a user; etcd's grpc-proxy requires this.
	client := template("")
	client.Subject.Organization = []string{"rangecache"}
	client.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	clientKey := newKey(t)
	c.clientCert = c.writeCertificate(t, "client.crt", client, ca, clientKey, caKey)
	c.clientKey = c.writeKey(t, "client.key", clientKey)

	c.serviceAccountKey = c.writeKey(t, "service-account.key", newKey(t))
	c.tokens = c.write(t, "tokens.csv", []byte(token+`,admin,1,"system:masters"`+"\n"))
	return c
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, "a key", err)
	return key
}

func template(name string) *x509.Certificate {
	certificateSerial++
	return &x509.Certificate{
		SerialNumber: big.NewInt(certificateSerial),
		Subject:      pkix.Name{CommonName: name},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(90 * 24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
}

func (c *certificates) writeCertificate(t *testing.T, name string, certificate, parent *x509.Certificate, key, parentKey *ecdsa.PrivateKey) string {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, certificate, parent, &key.PublicKey, parentKey)
	must(t, name, err)
	return c.write(t, name, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
}

func (c *certificates) writeKey(t *testing.T, name string, key *ecdsa.PrivateKey) string {
	t.Helper()
	der, err := x509.MarshalECPrivateKey(key)
	must(t, name, err)
	return c.write(t, name, pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
}

func (c *certificates) write(t *testing.T, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(c.dir, name)
	must(t, path, os.WriteFile(path, data, 0o600))
	return path
}
